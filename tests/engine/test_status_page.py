"""The page of shared memory on which an engine and the outside meet."""

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_ray.config import DpsConfigError
from dps_ray.engine import status_page
from dps_ray.engine.rank_section import MAX_LAYERS, MAX_UNITS
from dps_ray.engine.status_page import MAX_RANKS, StatusPage
from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.permits import Permits
from dps_ray.status import EngineStatus

PUBLICATIONS, READINGS = 60_000, 100
"""Those that are made and seen at least."""
TIMEOUT_S = 120.0
READER = """
import sys
from dataclasses import fields
from dps_ray.engine.status_page import StatusPage

page, last, readings = StatusPage.attach(sys.argv[1]), -1.0, 0
numbers = ("base_blocks", "used_blocks", "waiting", "tokens_fast", "restores_cancelled")
print("ready", flush=True)
while last < float(sys.argv[2]) - 1 or readings <= float(sys.argv[3]):
    status = page.read()
    if status is None:
        continue
    seen = {getattr(status, name) for name in numbers}
    assert len(seen) == 1, f"torn: {status}"
    assert status.fault == f"fault {status.base_blocks}", f"torn text: {status}"
    assert status.sequence == status.base_blocks + 1, f"torn sequence: {status}"
    assert status.base_blocks >= last, "an older status came back"
    readings += status.base_blocks > last
    last = status.base_blocks
print(readings)
"""

counts = st.integers(0, 2**53)
times = st.floats(0, 1e12)
statuses = st.builds(
    EngineStatus,
    **{
        field.name: {int: counts, float: times, bool: st.booleans()}.get(field.type, st.none())
        for field in fields(EngineStatus)
    }
    | {
        "mode": st.sampled_from(Mode),
        "pin": st.sampled_from(Pin),
        "restore_progress": st.none() | st.floats(0, 1),
        "last_restore_s": st.none() | times,
        "restore_left_s": st.none() | times,
        "fault": st.none()
        | st.text(
            st.characters(blacklist_characters="\0", codec="ascii"), min_size=1, max_size=239
        ),
    },
)


def a_status(number: int = 0) -> EngineStatus:
    """A status whose numbers are all the same."""
    values = {
        field.name: number if field.type is int else float(number) for field in fields(EngineStatus)
    }
    return EngineStatus(
        **values
        | {
            "mode": Mode.FAST,
            "pin": Pin.AUTO,
            "restoring": True,
            "wants_restore": False,
            "fault": f"fault {number}",
        }  # type: ignore[arg-type]
    )


@pytest.fixture
def page() -> Iterator[StatusPage]:
    page = StatusPage.create(f"test-{uuid.uuid4().hex[:12]}")
    yield page
    page.remove()


@pytest.fixture(scope="module")
def one_page() -> Iterator[StatusPage]:
    page = StatusPage.create(f"test-{uuid.uuid4().hex[:12]}")
    yield page
    page.remove()


def key_of(page: StatusPage) -> str:
    return page._path.name.removeprefix("dps-")


@settings(deadline=None)
@given(status=statuses)
def test_every_field_comes_back(one_page: StatusPage, status: EngineStatus) -> None:
    one_page.publish(status)
    read = one_page.read()
    assert read is not None
    assert read == replace(status, sequence=read.sequence)
    for field in fields(EngineStatus):
        assert type(getattr(read, field.name)) is type(getattr(status, field.name)), field.name


def test_fields_unknown_to_the_page_would_be_noticed() -> None:
    """The strategy above must not leave a field at ``None`` that never is."""
    optional = {"restore_progress", "restore_left_s", "last_restore_s", "fault"}
    named = {"mode", "pin", *optional}
    assert {f.name for f in fields(EngineStatus) if f.type not in (int, float, bool)} == named


def test_nothing_is_known_before_the_first_publication(page: StatusPage) -> None:
    assert page.read() is None


def test_mix_of_two_publications_is_never_taken_for_one(page: StatusPage) -> None:
    """Another processor may see the stores of a publication in any order."""
    page.publish(a_status(1))
    old = page._cells.copy()
    page.publish(a_status(2))
    new = page._cells.copy()
    rng = np.random.default_rng(0)
    changed = np.flatnonzero(old.view(np.uint64) != new.view(np.uint64))
    for seen in range(1, len(changed)):
        page._cells[:] = old
        arrived = rng.choice(changed, seen, replace=False)
        page._cells[arrived] = new[arrived]
        timer = threading.Timer(0.005, page._cells.__setitem__, (slice(None), new))
        timer.start()
        status = page.read()
        timer.join()
        assert status == replace(a_status(2), sequence=2)


def test_sequence_grows_by_one_a_publication(page: StatusPage) -> None:
    sequences = []
    for number in range(3):
        page.publish(a_status(number))
        status = page.read()
        assert status is not None
        sequences.append(status.sequence)
    assert sequences == [1, 2, 3]


def test_long_fault_is_cut_and_a_short_one_leaves_nothing_of_it(page: StatusPage) -> None:
    for fault, read in (("x" * 400, "x" * 239), ("short", "short"), (None, None)):
        page.publish(replace(a_status(), fault=fault))
        status = page.read()
        assert status is not None
        assert status.fault == read


def test_cut_inside_a_character_still_reads(page: StatusPage) -> None:
    page.publish(replace(a_status(), fault="ü" * 200))
    status = page.read()
    assert status is not None
    assert status.fault is not None
    assert status.fault.startswith("ü" * 119)


def test_pin_reaches_every_process_that_has_the_page(page: StatusPage) -> None:
    other = StatusPage.attach(key_of(page))
    assert other.requested_pin() is None
    for pin in Pin:
        page.set_pin(pin)
        assert other.requested_pin() is pin
    other.close()


def test_pin_survives_a_publication(page: StatusPage) -> None:
    page.set_pin(Pin.FAST)
    page.publish(a_status())
    assert page.requested_pin() is Pin.FAST


def test_where_layers_lie_comes_back_to_the_byte(page: StatusPage) -> None:
    assert page.rank(3).layer_bounds == []
    bounds = [(start, start + (1 << 33) + 1) for start in range(0, MAX_LAYERS << 34, 1 << 34)]
    page.rank(3).layer_bounds = bounds
    assert page.rank(3).layer_bounds == bounds
    assert page.rank(2).layer_bounds == page.rank(4).layer_bounds == []


def test_cause_of_a_failed_restore_is_cut_and_a_shorter_one_leaves_nothing_of_it(
    page: StatusPage,
) -> None:
    section = page.rank(0)
    assert section.error == ""
    section.error = "x" * 150 + "\N{GREEK SMALL LETTER MU}" * 20
    assert section.error == "x" * 150 + "\N{GREEK SMALL LETTER MU}" * 5
    section.error = "link down"
    assert section.error == "link down"


def test_ranks_do_not_share_a_cell(page: StatusPage) -> None:
    page.publish(a_status(7))
    for rank in range(MAX_RANKS):
        section = page.rank(rank)
        assert len(section.outcomes) == MAX_UNITS
        section["base_blocks"] = rank
        section["full_steps"] = rank
        section.outcomes[:] = rank
        section.layer_bounds = [(rank, rank + 1)] * MAX_LAYERS
        section.error = f"link {rank} down"
    for rank in range(MAX_RANKS):
        section = page.rank(rank)
        assert section["base_blocks"] == section["full_steps"] == rank
        assert section.layer_bounds == [(rank, rank + 1)] * MAX_LAYERS
        assert set(section.outcomes) == {rank}
        assert section.error == f"link {rank} down"
    assert page.read() == replace(a_status(7), sequence=1)


def test_unknown_key_is_refused_in_one_line() -> None:
    with pytest.raises(DpsConfigError) as caught:
        StatusPage.attach("no-such-engine")
    assert str(caught.value) == (
        "no status page /dev/shm/dps-no-such-engine: the engine's processes must share one host "
        "and its /dev/shm; run all ranks of a replica on one node"
    )


def test_key_in_use_is_not_overwritten(page: StatusPage) -> None:
    page.publish(a_status(3))
    with pytest.raises(FileExistsError):
        StatusPage.create(key_of(page))
    assert page.read() is not None


def test_ranks_that_come_at_once_share_one_page() -> None:
    key = f"test-{uuid.uuid4().hex[:12]}"
    with ThreadPoolExecutor(8) as pool:
        pages = list(pool.map(lambda _: StatusPage.join(key), range(32)))
    pages[0].set_pin(Pin.FAST)
    assert {page.requested_pin() for page in pages} == {Pin.FAST}
    pages[0].remove()
    assert not list(Path("/dev/shm").glob(f"*{key}*"))


def test_new_page_allows_everything(page: StatusPage) -> None:
    assert page.permits() == Permits(restore=True, fast=True)


def test_permit_to_restore_ends_at_its_time(
    page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(status_page, "time", SimpleNamespace(monotonic=lambda: now_s))
    page.set_permits(restore_until_s=100.5, fast=False)
    assert page.permits() == Permits(restore=True, fast=False)
    now_s = 100.5
    assert page.permits() == Permits(restore=False, fast=False)
    page.set_permits(restore_until_s=0.0, fast=True)
    assert page.permits() == Permits(restore=False, fast=True)
    page.set_permits(restore_until_s=0.0, fast=True, stop_restores=True)
    assert page.permits() == Permits(restore=False, stop=True)
    page.set_permits(restore_until_s=None, fast=True)
    assert page.permits() == Permits()


def test_reader_in_another_process_never_sees_a_torn_status(page: StatusPage) -> None:
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, key_of(page), str(PUBLICATIONS), str(READINGS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        give_up_at_s = time.monotonic() + TIMEOUT_S
        for number in count():
            page.publish(a_status(number))
            # On one core the reader sees little of what is written in a turn of the writer's.
            if number >= PUBLICATIONS and reader.poll() is not None:
                break
            assert time.monotonic() < give_up_at_s, "the reader never saw the writer write"
        out, err = reader.communicate()
    finally:
        reader.kill()
    assert reader.returncode == 0, err
    assert int(out) > READINGS, "the reader must have looked while the writer wrote"


def test_writer_that_died_mid_write_is_named(page: StatusPage) -> None:
    page.publish(a_status(7))
    page._cells[np.flatnonzero(page._cells == 7.0)[0]] += 1
    with pytest.raises(RuntimeError, match="never settles: its writer died mid-write"):
        page.read()
