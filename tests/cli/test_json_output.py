"""Standard output is the report's alone, whatever vLLM logs when it is imported."""

import os
import subprocess
import sys

import pytest

from dps_ray.cli.main import LEVEL, main


@pytest.mark.parametrize("flags", [["--json"], []])
def test_no_log_of_vllm_stands_beside_a_report(flags: list[str]) -> None:
    """Only a process of its own shows it."""
    words = ["check", "chaos", "--replicas", "0", *flags]
    command = [sys.executable, "-m", "dps_ray.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--replicas is 0" in done.stderr.splitlines()[-1]
    assert not done.stdout


def test_fleets_keep_the_log_level_that_the_operator_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL, raising=False)
    main(["check", "chaos", "--replicas", "0"])
    assert LEVEL not in os.environ
