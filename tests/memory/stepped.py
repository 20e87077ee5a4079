"""A restore worker on a real region whose copies and fences a test steps through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dps_ray.commands import RestoreTask
from dps_ray.memory.checksum import checksum64
from dps_ray.memory.driver import Executor, VmmError
from dps_ray.memory.host_driver import HostDriver, HostExecutor
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.restore import RestoreWorker
from dps_ray.memory.restore_result import RestoreResult
from dps_ray.memory.segment_copy import SegmentCopy

if TYPE_CHECKING:
    from conftest import Rig

TIMEOUT_S = 20.0
STEP_S = 1.2e-4
"""Such steps first save up for one row, half a segment."""


class Gate:
    """A fence that a test opens."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.waiting = threading.Event()
        self.opened = threading.Event()
        if is_open:
            self.opened.set()

    def wait(self) -> None:
        self.waiting.set()
        assert self.opened.wait(TIMEOUT_S)


OPEN = Gate(is_open=True)


class SteppedExecutor(HostExecutor):
    """Copies for real, but stops before a chosen copy until the test lets it go on."""

    def __init__(self) -> None:
        self.copies = 0
        self.stop_before: int | None = None
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.damage_next = False
        self.refuse_next = False

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        if self.copies == self.stop_before:
            self.reached.set()
            assert self.go_on.wait(TIMEOUT_S)
        if self.refuse_next:
            self.refuse_next = False
            raise VmmError("copy", f"{source.numel()} bytes", "link down")
        super().copy(destination, source)

    def copy_summed(
        self, destination: torch.Tensor, source: torch.Tensor, first_row: int
    ) -> int | None:
        """Sums what is stored, on its way, as the real one does."""
        if self.damage_next:
            self.damage_next = False
            source = source.clone()
            source[source.numel() // 2] ^= 1
        self.copy(destination, source)
        return checksum64(source.numpy(), first_row)


class SteppedDriver(HostDriver):
    def __init__(self) -> None:
        super().__init__()
        self.stepped = SteppedExecutor()

    @property
    def transfer(self) -> Executor:
        return self.stepped

    @property
    def between_steps(self) -> Executor | None:
        return self.stepped


class WatchedWorker(RestoreWorker):
    """Tells when a hold has reached its thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.resting = threading.Event()
        super().__init__(*args, **options)

    def _wait_released(self, copy: SegmentCopy) -> None:
        self.resting.set()
        super()._wait_released(copy)


class Bench:
    """A rig in fast mode with all units lent, and a worker on it."""

    def __init__(self, rig: Rig, executor: SteppedExecutor, verify: bool) -> None:
        self.rig, self.executor = rig, executor
        self.results: list[RestoreResult] = []
        self.epoch = 0
        # No stall of the test may be taken for a rest: the restore thread would copy.
        self.pacer = Pacer(max_inflation=0.05, floor_bytes_per_s=1e6, idle_after_s=2 * TIMEOUT_S)
        rig.region.upload_all()
        executor.copies = 0
        for unit in range(rig.region.geometry.num_units):
            rig.region.unit_kv_view(unit).fill_(0xAB)
        self.worker = WatchedWorker(
            rig.region,
            pacer=self.pacer,
            chunk_bytes=4096,
            verify=verify,
            on_done=self.results.append,
        )

    def submit(self, segment: int, gate: Gate = OPEN, unit: int | None = None) -> RestoreTask:
        self.epoch += 1
        task = RestoreTask(segment if unit is None else unit, segment, self.epoch)
        self.worker.submit(task, gate)
        return task

    def end_step(self, *, load: int = 8, step_s: float = STEP_S) -> int:
        """End a forward pass in the calling thread; the bytes it copied."""
        self.pacer.note_step(step_s, False, load)
        before = self.worker.counters().bytes
        self.worker.copy_between_steps()
        return self.worker.counters().bytes - before

    def settle(self) -> None:
        assert self.worker.wait_idle(TIMEOUT_S)

    def untouched(self, unit: int) -> bool:
        return bool((self.rig.region.unit_kv_view(unit) == 0xAB).all())

    def in_place(self, segment: int) -> bool:
        region = self.rig.region
        return torch.equal(region.segment_view(segment), region.backup.segment(segment))


MakeBench = Callable[..., Bench]
