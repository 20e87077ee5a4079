"""The load generator against vLLM's own API server, unchanged, on a tiny model."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dps_ray.cli.main import main
from dps_ray.models.tiny import make_tiny

pytestmark = pytest.mark.engine


@pytest.fixture
def server_url(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as reserved:
        # Nobody else gets the port until the server, which shares it, has started.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        with serving(reserved.getsockname()[1], tmp_path) as url:
            yield url


@contextmanager
def serving(port: int, tmp_path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(make_tiny("qwen3", tmp_path)), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "512", "--block-size", "32"]
    command += ["--kv-cache-memory-bytes", str(32 << 20)]
    environment = {
        **os.environ,
        "VLLM_PLUGINS": "none",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = tmp_path / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, log, timeout_s=300.0)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_ready(url: str, process: subprocess.Popen, log: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail(f"server not ready: {log.read_text()[-3000:]}")


def test_replay_gets_exact_lengths_from_a_stock_server(
    server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "replay", "azure-2023-code-excerpt", "--url", server_url]
    arguments += ["--max-requests", "8", "--speed", "4", "--json"]
    arguments += ["--max-prompt-tokens", "40", "--max-output-tokens", "6"]
    status = main(arguments)
    printed = json.loads(capsys.readouterr().out)
    assert status == 0, printed
    assert printed["requests"]["ok"] == 8
    assert printed["output_tokens"] == 8 * 6
    assert printed["prompt_tokens"] == 8 * 40
    assert printed["latency"]["ttft"]["count"] == 8
    assert printed["latency"]["tpot"]["p50_ms"] > 0
