"""The short way to a mixture's experts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dps_ray.checks.process import engine_environment

pytestmark = pytest.mark.engine


def test_layers_go_past_a_runner_that_adds_nothing_and_compute_the_same_bits() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.runners"],
        env={**engine_environment(threads=1), "TORCHDYNAMO_DISABLE": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["layers"] == found["direct"] == found["equal"] == 4
    assert found["missed"] == []
