"""A rank that dies amid a restore: the engine dies cleanly, never in full mode meanwhile."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

pytestmark = [pytest.mark.engine]

LIMIT_S = 100.0
"""Well below what vLLM waits for a step's ranks, 300 s, and far above what it takes."""
SCRIPT = Path(__file__).with_name("dying_rank.py")


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie that only waits to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_rank_killed_amid_a_restore_takes_the_engine_with_it_and_nothing_is_left() -> None:
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(make_tiny("qwen3", cache_root()))],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    seen = json.loads(lines[-1])
    assert seen["idle_engine_obeys"]
    assert seen["units_lent"] > 0
    assert seen["restoring"]
    assert seen["error"] == "EngineDeadError"
    assert seen["noticed_after_s"] < LIMIT_S
    assert seen["mode"] == "fast"
    assert seen["units_backed"] < seen["units"]
    deadline_s = time.monotonic() + LIMIT_S
    while left := [pid for pid in seen["children"] if runs(pid)]:
        assert time.monotonic() < deadline_s, f"processes {left} outlive the engine"
        time.sleep(0.1)
    assert not Path(f"/dev/shm/dps-{seen['key']}").exists()
