"""While steps run, their own thread copies, slice by slice; the restore thread does the rest."""

from __future__ import annotations

import threading
import time

import pytest

from dps_ray.memory import handover

from .stepped import TIMEOUT_S, Bench, Gate, MakeBench


def busy(made: Bench) -> None:
    """Let steps run before anything is restored."""
    for _ in range(4):
        made.end_step()


def first_slice(made: Bench) -> int:
    """End steps until one has copied something; the bytes."""
    limit_s = time.monotonic() + TIMEOUT_S
    while not (nbytes := made.end_step()):
        assert time.monotonic() < limit_s, "no step copied anything"
        time.sleep(1e-4)
    return nbytes


def test_steps_copy_every_byte_in_their_own_thread(bench: MakeBench) -> None:
    made = bench()
    threads = set()
    copy = made.executor.copy_summed

    def watched(*args: object) -> int | None:
        threads.add(threading.get_ident())
        return copy(*args)  # type: ignore[arg-type]

    made.executor.copy_summed = watched  # type: ignore[method-assign, assignment]
    busy(made)
    tasks = [made.submit(segment) for segment in range(3)]
    copied = 0
    while not made.worker.wait_idle(0.0):
        copied += made.end_step()
    assert threads == {threading.get_ident()}
    assert [result.task for result in made.results] == tasks
    assert all(result.ok for result in made.results)
    assert copied == made.worker.counters().bytes == sum(r.nbytes for r in made.results)
    assert all(made.in_place(segment) for segment in range(3))


def test_a_long_step_copies_whole_segments_and_the_restore_thread_reports_them_between_steps(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "MOST_WAIT_S", TIMEOUT_S)
    made, gate = bench(), Gate()
    busy(made)
    for segment in range(6):
        made.submit(segment, gate)
    gate.opened.set()
    while not (copied := made.end_step(step_s=1.0)):
        time.sleep(1e-4)
    assert copied == made.rig.arena.used_bytes
    assert [result.ok for result in made.results] == [True] * 6
    seconds = [result.seconds for result in made.results]
    assert min(seconds) > 0.0
    assert sum(seconds) == pytest.approx(made.worker.counters().busy_seconds)
    assert made.rig.layers_intact()


def test_nothing_is_copied_beside_a_step(bench: MakeBench) -> None:
    made = bench()
    busy(made)
    made.submit(0)
    assert not made.worker.wait_idle(0.05)
    assert made.untouched(0)


def test_the_restore_thread_goes_on_as_soon_as_a_step_was_idle(bench: MakeBench) -> None:
    made = bench()
    busy(made)
    made.submit(0)
    first_slice(made)
    made.end_step(load=0)
    assert made.worker.wait_idle(TIMEOUT_S), "it waited until the steps were forgotten"
    assert made.results[0].ok
    assert made.in_place(0)


def test_a_steal_between_two_slices_ends_the_copy(bench: MakeBench) -> None:
    made = bench()
    busy(made)
    task = made.submit(0)
    first_slice(made)
    made.worker.cancel(task)
    made.rig.region.unit_kv_view(0).fill_(0x11)
    assert [made.end_step() for _ in range(20)] == [0] * 20
    made.settle()
    assert bool((made.rig.region.unit_kv_view(0) == 0x11).all())
    assert made.results == []
    assert made.worker.counters().cancelled == 1


def test_a_held_restore_gets_no_slices_and_is_read_again_after_it(bench: MakeBench) -> None:
    made = bench()
    busy(made)
    made.submit(0)
    nbytes = first_slice(made)
    made.worker.hold(True)
    assert made.worker.resting.wait(TIMEOUT_S)
    assert not made.worker.wait_idle(0.05)
    assert [made.end_step() for _ in range(20)] == [0] * 20
    made.rig.region.segment_view(0)[7] ^= 1
    made.worker.hold(False)
    while not made.worker.wait_idle(0.0):
        made.end_step()
    (result,) = made.results
    assert not result.ok
    assert result.resumed_bytes == nbytes


def test_a_slice_that_cannot_be_copied_fails_its_restore_and_no_step(bench: MakeBench) -> None:
    made = bench()
    busy(made)
    made.submit(0)
    made.submit(1)
    made.executor.refuse_next = True
    while not made.worker.wait_idle(0.0):
        made.end_step()
    assert [result.ok for result in made.results] == [False, True]
    assert "link down" in str(made.results[0].error)


def test_a_damaged_slice_is_found(bench: MakeBench) -> None:
    made = bench()
    busy(made)
    made.submit(0)
    made.executor.damage_next = True
    while not made.worker.wait_idle(0.0):
        made.end_step()
    assert not made.results[0].ok
