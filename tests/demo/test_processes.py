"""Whatever a child starts is seen and stopped, even after the child itself has gone."""

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dps_ray.demo.processes import (
    PR_SET_CHILD_SUBREAPER,
    adopt_orphans,
    descendants,
    stop_descendants,
)

SLEEP = "import time; time.sleep(300)"
ORPHAN = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print(flush=True); time.sleep(300)"
)


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def wait_for(count: int, before: set[int]) -> set[int]:
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        found = descendants() - before
        if len(found) == count:
            return found
        time.sleep(0.05)
    pytest.fail(f"expected {count} new descendants, found {descendants() - before}")


@pytest.fixture
def adopting() -> Iterator[None]:
    adopt_orphans()
    yield
    # Tests that follow must not find other tests' orphans among their own children.
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


@pytest.mark.usefixtures("adopting")
def test_orphan_in_a_session_of_its_own_is_adopted_and_stopped() -> None:
    before = descendants()
    parent = start(ORPHAN)
    parent.wait(timeout=120)
    (orphan,) = wait_for(1, before)
    assert orphan != parent.pid
    assert stop_descendants(before, grace_s=5.0) == set()
    assert not descendants() - before


def test_process_that_ignores_sigterm_is_killed_after_the_grace_time() -> None:
    before = descendants()
    stubborn = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert stubborn.stdout is not None
    with stubborn.stdout as told:
        # It ignores the signal from now on.
        assert told.readline() == b"\n"
    started_s = time.monotonic()
    assert stop_descendants(before, grace_s=1.0) == set()
    assert time.monotonic() - started_s >= 1.0


def test_processes_of_others_are_left_alone() -> None:
    mine = start(SLEEP)
    try:
        before = descendants()
        assert mine.pid in before
        start(SLEEP)
        wait_for(1, before)
        stop_descendants(before, grace_s=5.0)
        assert mine.poll() is None
    finally:
        mine.kill()
        mine.wait()
