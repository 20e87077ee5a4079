"""vLLM's own front ends fail before they start anything, and end with the one line that helps."""

import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.engine

OFFLINE_CLASS = """
import json, sys
from vllm import LLM
LLM(model=sys.argv[1], quantization="dps", additional_config=json.loads(sys.argv[2]))
"""
UNIT = '{"dps": {"unit_bytes": 99999999999}}'
EXPECTED = (
    "dps_ray.config.DpsConfigError: additional_config.dps.unit_bytes is 99999999999: the residual "
    "of 3145728 bytes fills less than one unit; use at most 3145728"
)


@pytest.mark.parametrize("front", ["server", "class"])
def test_unit_that_no_engine_could_have_ends_the_front_process(tiny: Any, front: str) -> None:
    folder = str(tiny("qwen3"))
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", "0"]
    server += ["--quantization", "dps", "--additional-config", UNIT]
    arguments = server if front == "server" else ["-c", OFFLINE_CLASS, folder, UNIT]
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode != 0
    # vLLM prints its traceback first, and its server marks each line with its process id.
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(EXPECTED)
    assert "EngineCore" not in done.stderr + done.stdout, "an engine process was started"
