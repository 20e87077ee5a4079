"""The restore thread: fences, cancellation, verification, order."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from dps_ray.memory.driver import Fence
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.restore_result import RestoreResult

from .stepped import (
    TIMEOUT_S,
    Bench,
    Gate,
    MakeBench,
    SteppedDriver,
    SteppedExecutor,
)

if TYPE_CHECKING:
    from conftest import BuildRig


def test_all_segments_come_back_verified_and_in_order(bench: MakeBench) -> None:
    made = bench()
    tasks = [made.submit(segment) for segment in (2, 0, 5, 4, 1, 3)]
    made.settle()
    assert [result.task for result in made.results] == tasks
    assert all(result.ok and result.error is None for result in made.results)
    assert made.rig.layers_intact()
    counters = made.worker.counters()
    assert counters.bytes == sum(result.nbytes for result in made.results)
    assert counters.bytes == made.rig.arena.used_bytes
    assert (counters.completed, counters.cancelled, counters.failed) == (6, 0, 0)
    assert counters.busy_seconds > 0


def test_any_binding_restores_a_segment_into_whichever_unit_is_free(bench: MakeBench) -> None:
    made = bench("any")
    for segment, unit in [(0, 3), (1, 5), (2, 0), (3, 1), (4, 2), (5, 4)]:
        made.submit(segment, unit=unit)
    made.settle()
    assert all(result.ok for result in made.results)
    assert made.rig.layers_intact()
    assert [made.rig.region.unit_of(segment) for segment in range(6)] == [3, 5, 0, 1, 2, 4]


def test_nothing_is_copied_before_the_fence_and_late_kv_writes_are_overwritten(
    bench: MakeBench,
) -> None:
    made, gate = bench(), Gate()
    made.submit(1, gate)
    assert gate.waiting.wait(TIMEOUT_S)
    time.sleep(0.01)
    assert made.untouched(1)
    made.rig.region.unit_kv_view(1).fill_(0xCD)
    gate.opened.set()
    made.settle()
    assert made.in_place(1)


def test_cancel_returns_only_after_the_chunk_in_flight(bench: MakeBench) -> None:
    made = bench()
    made.executor.stop_before = 1
    task = made.submit(0)
    assert made.executor.reached.wait(TIMEOUT_S)
    canceller = threading.Thread(target=made.worker.cancel, args=(task,))
    canceller.start()
    canceller.join(0.05)
    assert canceller.is_alive(), "cancel returned while a chunk was being copied"
    made.executor.go_on.set()
    canceller.join(TIMEOUT_S)
    assert not canceller.is_alive()
    made.rig.region.unit_kv_view(0).fill_(0x11)
    made.settle()
    assert bool((made.rig.region.unit_kv_view(0) == 0x11).all())
    assert made.executor.copies == 1
    assert made.results == []
    assert made.worker.counters().cancelled == 1


def test_cancel_of_a_queued_restore_leaves_the_others_in_order(bench: MakeBench) -> None:
    made, gate = bench(), Gate()
    tasks = [made.submit(0, gate), *[made.submit(segment) for segment in (1, 2, 3)]]
    assert gate.waiting.wait(TIMEOUT_S)
    made.worker.cancel(tasks[2])
    gate.opened.set()
    made.settle()
    assert [result.task for result in made.results] == [tasks[0], tasks[1], tasks[3]]
    assert made.untouched(2)


def test_cancel_at_the_fence_returns_at_once_and_nothing_is_copied(bench: MakeBench) -> None:
    made, gate = bench(), Gate()
    task = made.submit(0, gate)
    assert gate.waiting.wait(TIMEOUT_S)
    made.worker.cancel(task)
    gate.opened.set()
    made.settle()
    assert made.untouched(0)
    assert made.executor.copies == 0
    assert made.results == []


def test_cancel_of_a_finished_restore_changes_nothing(bench: MakeBench) -> None:
    made = bench()
    task = made.submit(0)
    made.settle()
    made.worker.cancel(task)
    assert made.in_place(0)
    assert made.worker.counters().cancelled == 0


def test_cancel_ends_a_pacing_delay(bench: MakeBench) -> None:
    made = bench()
    delayed = threading.Event()

    class Slow(Pacer):
        def next_delay_s(self, chunk_bytes: int) -> float:
            delayed.set()
            return TIMEOUT_S

    made.worker._pacer = Slow(max_inflation=0.05, floor_bytes_per_s=1.0)
    task = made.submit(0)
    assert delayed.wait(TIMEOUT_S)
    began_s = time.monotonic()
    made.worker.cancel(task)
    made.settle()
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    assert made.untouched(0)


def test_a_damaged_copy_is_never_reported_as_restored(bench: MakeBench) -> None:
    made = bench()
    made.executor.damage_next = True
    made.submit(2)
    made.submit(3)
    made.settle()
    assert [result.ok for result in made.results] == [False, True]
    assert "segment 2 differs from the backup" in str(made.results[0].error)
    assert made.worker.counters().failed == 1


def test_a_refused_copy_is_reported_and_the_next_restore_goes_on(bench: MakeBench) -> None:
    made = bench()
    made.executor.refuse_next = True
    made.submit(1)
    made.submit(2)
    made.settle()
    assert [result.ok for result in made.results] == [False, True]
    assert "segment 1 was not restored into unit 1: copy(4096 bytes): link down" in str(
        made.results[0].error
    )


def test_a_segment_sent_to_another_unit_under_fixed_binding_is_an_error(bench: MakeBench) -> None:
    made = bench("fixed")
    made.submit(1, unit=2)
    made.settle()
    assert not made.results[0].ok
    assert made.untouched(1)
    assert made.untouched(2)


def test_stop_abandons_everything_and_refuses_more(bench: MakeBench) -> None:
    made, gate = bench(), Gate()
    for segment in range(3):
        made.submit(segment, gate)
    assert gate.waiting.wait(TIMEOUT_S)
    stopping = threading.Thread(target=made.worker.stop)
    stopping.start()
    # It abandons those that wait, then waits for the one at the gate.
    give_up_at_s = time.monotonic() + TIMEOUT_S
    while made.worker.counters().cancelled < 2:
        assert time.monotonic() < give_up_at_s
        time.sleep(1e-4)
    gate.opened.set()
    stopping.join(TIMEOUT_S)
    assert not stopping.is_alive()
    made.worker.stop()
    assert made.executor.copies == 0
    assert made.worker.counters().cancelled == 3
    with pytest.raises(RuntimeError, match=r"submitted after stop\(\)"):
        made.submit(0)


LANDING_S = 0.02


class SlowLanding:
    def wait(self) -> None:
        time.sleep(LANDING_S)


class QueueingExecutor(SteppedExecutor):
    """Returns from a copy at once, as a stream does; the chunk lands when it is waited for."""

    depth = 2

    def copy_summed(
        self, destination: torch.Tensor, source: torch.Tensor, first_row: int
    ) -> int | None:
        self.copy(destination, source)
        return None

    def mark(self) -> Fence:
        return SlowLanding()


def test_the_link_is_measured_where_chunks_land_not_where_they_are_issued(
    build: BuildRig,
) -> None:
    class Noting(Pacer):
        def note_copy(self, nbytes: int, seconds: float) -> None:
            landed.append((nbytes, seconds))

    landed: list[tuple[int, float]] = []
    driver = SteppedDriver()
    driver.stepped = QueueingExecutor()
    made = Bench(build("fixed", driver=driver), driver.stepped, verify=True)
    made.worker._pacer = Noting(max_inflation=0.05, floor_bytes_per_s=1e6)
    made.submit(0)
    made.settle()
    made.worker.stop()
    (result,) = made.results
    assert result.ok
    assert len(landed) > 1
    assert sum(nbytes for nbytes, _ in landed) == result.nbytes
    assert all(seconds > LANDING_S / 2 for _, seconds in landed)
    assert result.seconds >= sum(seconds for _, seconds in landed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_callback_is_not_swallowed(bench: MakeBench) -> None:
    made = bench()

    def refuse(result: RestoreResult) -> None:
        raise OSError("status page gone")

    made.worker._on_done = refuse
    task = made.submit(0)
    made.settle()
    made.worker.cancel(task)
    with pytest.raises(RuntimeError, match="restore thread died") as caught:
        made.submit(1)
    assert isinstance(caught.value.__cause__, OSError)
