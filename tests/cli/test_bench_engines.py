"""``dps-ray bench pressure`` and ``check``: what is refused, and what stands on standard output."""

import subprocess
import sys

import pytest

from dps_ray.cli.main import main


def test_bounds_in_the_wrong_order_are_refused_before_an_engine_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "pressure", "--prompt-tokens", "500", "100"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "--prompt-tokens is 500 100: give the smaller bound first" in said.err


def test_json_leaves_standard_output_to_one_object() -> None:
    """vLLM logs as soon as it is imported, which only a process of its own shows."""
    words = ["check", "chaos", "--replicas", "0", "--json"]
    command = [sys.executable, "-m", "dps_ray.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--replicas is 0" in done.stderr
    assert not done.stdout
