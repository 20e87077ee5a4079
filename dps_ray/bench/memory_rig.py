"""One rank's memory on the host driver, large enough to measure, and ways to time it in turns."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from dps_ray.commands import RestoreTask, StepCommand
from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.driver import PhysicalHandle
from dps_ray.memory.geometry import plan_geometry
from dps_ray.memory.host_driver import HostDriver, Reached
from dps_ray.memory.manager import MemoryManager
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.region import Binding, SharedRegion
from dps_ray.memory.restore_result import RestoreResult
from dps_ray.modes import Mode

BLOCK_BYTES = 256 << 10


class CountingDriver(HostDriver):
    """The host driver, counting the calls that reach the system."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def create(self, nbytes: int) -> PhysicalHandle:
        self.calls += 1
        return super().create(nbytes)

    def map(self, address: int, handle: PhysicalHandle) -> None:
        self.calls += 1
        super().map(address, handle)

    def unmap(self, address: int, nbytes: int) -> None:
        self.calls += 1
        super().unmap(address, nbytes)


@dataclass
class MemoryRig:
    """A region, its manager, and what the restores reported."""

    driver: CountingDriver
    region: SharedRegion
    manager: MemoryManager
    results: list[RestoreResult]
    _epoch: int = 0
    _units: list[int] = field(default_factory=list)

    @property
    def residual_bytes(self) -> int:
        return sum(self.region.backup.segment(unit).numel() for unit in self.units)

    @property
    def units(self) -> range:
        return range(self.region.geometry.num_units)

    def lend_all(self) -> None:
        """Give every unit to the KV cache, which writes it."""
        self.manager.apply(StepCommand(Mode.FAST, zero=tuple(self.units)), Reached())
        for unit in self.units:
            self.region.unit_kv_view(unit).fill_(1)

    def order_restore(self, shift: int = 0) -> None:
        """Order every segment back; under ``any``, ``shift`` units away from where it was."""
        count, tasks = len(self.units), []
        for segment in self.units:
            self._epoch += 1
            unit = (self.region.unit_of(segment) + shift) % count
            tasks.append(RestoreTask(unit, segment, self._epoch))
        self.manager.apply(StepCommand(Mode.FAST, restore=tuple(tasks)), Reached())

    def restore_all(self, shift: int = 0) -> float:
        """Lend everything, then bring it back; the seconds the way back took."""
        self.lend_all()
        self.results.clear()
        began_s = time.perf_counter()
        self.order_restore(shift)
        self.manager.wait_idle()
        taken_s = time.perf_counter() - began_s
        wrong = [result.error for result in self.results if not result.ok]
        if wrong or len(self.results) != len(self.units):
            raise RuntimeError(f"{len(self.results)} of {len(self.units)} restores ended: {wrong}")
        return taken_s

    def plain_copy(self) -> float:
        """The same bytes by ``memcpy`` on the same thread count; seconds."""
        self.lend_all()
        executor = self.driver.transfer
        began_s = time.perf_counter()
        for unit in self.units:
            executor.copy(self.region.segment_view(unit), self.region.backup.segment(unit))
        return time.perf_counter() - began_s


@contextmanager
def memory_rig(
    *, unit_bytes: int, units: int, binding: Binding, pacer: Pacer, chunk_bytes: int, verify: bool
) -> Iterator[MemoryRig]:
    """Build a rig whose residual fills ``units`` units, and take it down."""
    driver = CountingDriver()
    arena = ResidualArena(driver, units * unit_bytes)
    generator = torch.Generator().manual_seed(0)
    for index in range(units):
        layer = torch.randint(0, 256, (unit_bytes,), dtype=torch.uint8, generator=generator)
        arena.add(f"layer.{index}", layer)
    geometry = plan_geometry(
        kv_bytes=8 * unit_bytes,
        residual_bytes=arena.used_bytes,
        block_bytes=min(BLOCK_BYTES, unit_bytes),
        granularity_bytes=driver.granularity_bytes,
        unit_bytes=unit_bytes,
    )
    region = SharedRegion(driver, arena, geometry, binding)
    region.upload_all()
    results: list[RestoreResult] = []
    manager = MemoryManager(
        region, pacer=pacer, chunk_bytes=chunk_bytes, verify=verify, on_done=results.append
    )
    with manager:
        yield MemoryRig(driver, region, manager, results)


def in_turns(rounds: int, **runs: Callable[[], float]) -> dict[str, list[float]]:
    """Run each candidate once a round, in alternating order, after one round that does not count.

    Returns
    -------
    Seconds of each round, by candidate.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        names = list(runs) if turn % 2 else list(reversed(runs))
        for name in names:
            seconds = runs[name]()
            if turn:
                taken[name].append(seconds)
    return taken


def ratio(numerator: list[float], denominator: list[float]) -> dict[str, float]:
    """Median, quartiles and count of the ratios of interleaved rounds."""
    ratios = np.array(numerator) / np.array(denominator)
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {"median": float(middle), "q25": float(low), "q75": float(high), "count": len(ratios)}
