"""Standard output is the report's alone, whatever vLLM logs when it is imported."""

import argparse
import os
import subprocess
import sys

import pytest

from dps_ray.cli import check
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
    seen: list[str | None] = []

    def look(args: argparse.Namespace) -> int:
        seen.append(os.environ.get(LEVEL))
        return 0

    monkeypatch.delenv(LEVEL, raising=False)
    monkeypatch.setattr(check, "run_chaos", look)
    main(["check", "chaos"])
    monkeypatch.setenv(LEVEL, "DEBUG")
    main(["check", "chaos"])
    assert seen == [None, "DEBUG"]


def test_log_level_is_put_back_when_a_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL, raising=False)
    assert main(["validate", "nofile.yaml"]) == 1
    assert LEVEL not in os.environ
