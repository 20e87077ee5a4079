"""Restores that a burst holds: what they keep, and what they read again."""

from __future__ import annotations

from dps_ray.commands import RestoreTask

from .stepped import TIMEOUT_S, Bench, MakeBench


def hold_after(made: Bench, chunks: int) -> RestoreTask:
    """Begin a restore and hold it once ``chunks`` of its chunks have been copied."""
    made.executor.stop_before = chunks
    task = made.submit(0)
    assert made.executor.reached.wait(TIMEOUT_S)
    made.worker.hold(True)
    made.executor.go_on.set()
    assert made.worker.resting.wait(TIMEOUT_S)
    assert not made.worker.wait_idle(0.05)
    assert made.executor.copies == chunks
    return task


def test_a_held_restore_goes_on_where_it_stood_and_every_byte_is_verified(bench: MakeBench) -> None:
    made = bench()
    nbytes = made.rig.region.segment_view(0).numel()
    hold_after(made, 1)
    made.worker.hold(False)
    made.settle()
    (result,) = made.results
    assert (result.ok, result.nbytes, result.resumed_bytes) == (True, nbytes, 4096)
    assert made.worker.counters().bytes == nbytes, "bytes were copied twice"
    assert made.in_place(0)


def test_damage_before_a_hold_is_found_after_it(bench: MakeBench) -> None:
    made = bench()
    made.executor.damage_next = True
    hold_after(made, 1)
    made.worker.hold(False)
    made.settle()
    assert not made.results[0].ok


def test_a_stray_write_during_a_hold_is_found_after_it(bench: MakeBench) -> None:
    made = bench()
    hold_after(made, 1)
    made.rig.region.segment_view(0)[7] ^= 1
    made.worker.hold(False)
    made.settle()
    assert not made.results[0].ok


def test_a_held_restore_whose_unit_is_stolen_starts_from_nothing(bench: MakeBench) -> None:
    made = bench()
    made.worker.cancel(hold_after(made, 1))
    made.rig.region.unit_kv_view(0).fill_(0x11)
    made.submit(0)
    made.worker.hold(False)
    made.settle()
    (result,) = made.results
    assert (result.ok, result.resumed_bytes) == (True, 0)
    assert made.in_place(0)


def test_a_held_restore_can_be_stopped(bench: MakeBench) -> None:
    made = bench()
    hold_after(made, 1)
    made.worker.stop()
    assert made.results == []
