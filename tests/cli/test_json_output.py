"""``--json`` gives one object and nothing else on standard output."""

import subprocess
import sys


def test_json_leaves_standard_output_to_one_object() -> None:
    """vLLM logs as soon as it is imported, which only a process of its own shows."""
    words = ["check", "chaos", "--replicas", "0", "--json"]
    command = [sys.executable, "-m", "dps_ray.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--replicas is 0" in done.stderr
    assert not done.stdout
