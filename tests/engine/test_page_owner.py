"""Who removes an engine's status page, and when."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dps_ray.config import DpsConfigError
from dps_ray.engine.page_owner import remove_orphans
from dps_ray.engine.status_page import StatusPage

OWNER = """
import sys, time
from dps_ray.engine.status_page import StatusPage

StatusPage.create(sys.argv[1]).adopt()
print("made", flush=True)
time.sleep(600)
"""
MAKER = """
import sys
from dps_ray.engine.status_page import StatusPage

StatusPage.create(sys.argv[1])
print("made", flush=True)
sys.stdin.read()
"""


@contextmanager
def maker_of(key: str) -> Iterator[None]:
    """A process that made a page and lives until the block ends.

    Its page is nobody's afterwards: whoever makes a page next, in another process too, removes it.
    """
    with subprocess.Popen(
        [sys.executable, "-c", MAKER, key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "made\n"
        yield
    assert maker.returncode == 0


@pytest.fixture
def key() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def page(key: str) -> Iterator[StatusPage]:
    page = StatusPage.create(key)
    yield page
    page.remove()


def test_owner_unlinks_the_page_when_it_ends_and_a_maker_does_not(key: str) -> None:
    with maker_of(key):
        page = StatusPage.attach(key)
        page.adopt()
    assert StatusPage.attach(key).requested_pin() is None
    program = (
        "import sys; from dps_ray.engine.status_page import StatusPage\n"
        "StatusPage.join(sys.argv[1]).adopt()"
    )
    subprocess.run([sys.executable, "-c", program, key], check=True)
    with pytest.raises(DpsConfigError, match="no status page"):
        StatusPage.attach(key)
    page.remove()


def test_page_of_a_dead_process_is_removed_and_that_of_a_living_one_stays(
    key: str, page: StatusPage
) -> None:
    orphan = page._path.with_name(f"{page._path.name}-orphan")
    with maker_of(f"{key}-orphan"):
        remove_orphans()
        assert orphan.exists()
    remove_orphans()
    assert not orphan.exists()
    assert page._path.exists()


def test_page_of_a_killed_owner_that_nobody_has_reaped_is_removed(key: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, key], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "made\n"
    owner.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    remove_orphans()
    with pytest.raises(DpsConfigError, match="no status page"):
        StatusPage.attach(key)
    owner.communicate()


def test_process_that_started_an_engine_leaves_no_page_of_it_though_the_engine_was_killed(
    key: str,
) -> None:
    program = (
        "import subprocess, sys, weakref\n"
        "from dps_ray.engine.page_owner import remove_orphans_at_exit\n"
        "from dps_ray.engine.status_page import StatusPage\n"
        "remove_orphans_at_exit()\n"
        "engine = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdout=subprocess.PIPE)\n"
        "assert engine.stdout.readline() == b'made\\n'\n"
        "StatusPage.attach(sys.argv[2])\n"
        "weakref.finalize(engine, lambda: (engine.kill(), engine.communicate()))\n"
    )
    subprocess.run([sys.executable, "-c", program, OWNER, key], check=True)
    with pytest.raises(DpsConfigError, match="no status page"):
        StatusPage.attach(key)


def test_page_of_another_pid_namespace_stays(page: StatusPage) -> None:
    """Its owner's process id means nothing here."""
    page._cells[0], page._cells[1] = 2**22 + 1, page._cells[1] + 1
    remove_orphans()
    assert page._path.exists()
