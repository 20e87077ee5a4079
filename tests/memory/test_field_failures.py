"""What broke in systems like this one, as users reported it, shown not to break here.

One test a failure; the docstring says in which system it was seen. These have theirs elsewhere:

- late writes into memory given back: ``test_late_writer.py``, ``../engine/test_async_scheduler.py``
- idle engine whose cached blocks hold memory all over: ``../engine/test_block_pool.py``
- attention backend that splits KV blocks: ``../engine/test_kv_views.py`` (refused)
- layouts assumed rather than asked for: ``../engine/test_gpu_worker.py``
- state connectors, KV offloading, sleep amid requests: ``../engine/test_configure.py`` (refused)
- preemption collapse, growth under a watermark: ``../engine/test_async_scheduler.py``
- pinned memory over budget: ``../engine/test_rank.py``, ``test_arena_and_backup.py``
- accuracy of 8-bit experts: ``../kernels/test_moe.py``
- second set of graphs, its memory and time: ``../engine/mode_graphs``,
  ``../engine/test_graph_book.py``
- handles never released: ``test_cuda_driver_life.py``
- stale registrations of communication buffers: none needed, they never lie in units
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool

from dps_ray.commands import RestoreTask, StepCommand
from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.driver import PhysicalHandle, VmmError
from dps_ray.memory.geometry import plan_geometry
from dps_ray.memory.host_driver import HostDriver
from dps_ray.memory.manager import MemoryManager
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.region import SharedRegion
from dps_ray.memory.restore_result import RestoreResult
from dps_ray.modes import Mode
from dps_ray.scheduling.block_precision import BlockPrecision
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.policy import Pressure, SwitchLimits
from dps_ray.scheduling.sum_manager import SumManager

if TYPE_CHECKING:
    from conftest import BuildRig, Rig

TIMEOUT_S = 20.0
UNITS, BLOCKS_PER_UNIT, BASE_BLOCKS = 3, 4, 6


class RecordingDriver(HostDriver):
    """The host driver, with a log of the calls that change what stands where."""

    def __init__(self, refuse_create_after: int | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.refuse_next_map = False
        self._creates_left = refuse_create_after

    def create(self, nbytes: int) -> PhysicalHandle:
        self.calls.append("create")
        if self._creates_left is not None:
            self._creates_left -= 1
            if self._creates_left < 0:
                raise VmmError("create", f"{nbytes} bytes", "out of memory")
        return super().create(nbytes)

    def map(self, address: int, handle: PhysicalHandle) -> None:
        self.calls.append("map")
        if self.refuse_next_map:
            self.refuse_next_map = False
            raise VmmError("map", f"{handle.nbytes} bytes", "no")
        super().map(address, handle)

    def unmap(self, address: int, nbytes: int) -> None:
        self.calls.append("unmap")
        super().unmap(address, nbytes)


class Gate:
    """A step that is still queued; the fence of the next one."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def wait(self) -> None:
        assert self.opened.wait(TIMEOUT_S)


OPEN = Gate()
OPEN.opened.set()


def managed(rig: Rig, done: Callable[[RestoreResult], None]) -> MemoryManager:
    rig.region.upload_all()
    return MemoryManager(
        rig.region,
        pacer=Pacer(max_inflation=0.05, floor_bytes_per_s=1e9),
        chunk_bytes=4096,
        verify=True,
        on_done=done,
    )


def elastic_pool() -> tuple[ElasticBlockPool, SumManager]:
    plain = BlockPool(BASE_BLOCKS + UNITS * BLOCKS_PER_UNIT, enable_caching=True, hash_block_size=2)
    pool = ElasticBlockPool.make_elastic(plain, BASE_BLOCKS, BLOCKS_PER_UNIT)
    pool.manager = SumManager(
        UnitLedger(UNITS, BLOCKS_PER_UNIT), SwitchLimits(1.0, 0.6, 0.0, 0.0), pool,
        clock=lambda: 0.0,
    )  # fmt: skip
    pool.precision = BlockPrecision()
    return pool, pool.manager


def test_unmapping_against_a_queued_batch(build: BuildRig) -> None:
    """kvcached: a page was unmapped while a queued batch still read it."""
    driver = RecordingDriver()
    results: list[RestoreResult] = []
    with managed(build("any", driver=driver), results.append) as manager:
        manager.apply(StepCommand(Mode.FAST, zero=(0, 1)), OPEN)
        driver.calls.clear()
        queued = Gate()
        manager.apply(StepCommand(Mode.FAST, restore=(RestoreTask(0, 1, 1),)), queued)
        assert not manager.wait_idle(0.05)
        assert driver.calls == [], "an address changed under a queued step"
        queued.opened.set()
        assert manager.wait_idle(TIMEOUT_S)
        assert driver.calls == ["unmap", "unmap", "map", "map"]
        assert results[0].ok


def test_taking_memory_while_addresses_change(build: BuildRig) -> None:
    """kvcached: creating and mapping in one call faulted beside live kernels."""
    driver = RecordingDriver()
    rig = build("any", driver=driver)
    loading = driver.calls.index("map")
    assert "create" not in driver.calls[loading:], "memory was taken after an address had changed"
    rig.region.rebind(0, 2)
    assert driver.calls[-4:] == ["unmap", "unmap", "map", "map"]


def test_running_out_of_memory_while_waking_up(builder: BuildRig) -> None:
    """vLLM: waking up ran out of memory half way and left the rest taken."""
    driver = RecordingDriver(refuse_create_after=3)
    arena = ResidualArena(driver, 1 << 20)
    arena.add("layer", torch.ones(40_000, dtype=torch.uint8))
    geometry = plan_geometry(
        kv_bytes=1 << 20, residual_bytes=arena.used_bytes, block_bytes=4096,
        granularity_bytes=driver.granularity_bytes, unit_bytes=8192,
    )  # fmt: skip
    with pytest.raises(VmmError, match=r"create\(8192 bytes\): out of memory"):
        SharedRegion(driver, arena, geometry, "fixed")
    assert "map" not in driver.calls
    assert driver.created_bytes == 0
    arena.close()


def test_a_failed_driver_call_ending_the_process(build: BuildRig) -> None:
    """kvcached: a refused mapping called ``abort``; here it ends one restore, with its reason."""
    driver = RecordingDriver()
    results: list[RestoreResult] = []
    with managed(build("any", driver=driver), results.append) as manager:
        manager.apply(StepCommand(Mode.FAST, zero=(0, 1)), OPEN)
        driver.refuse_next_map = True
        manager.apply(StepCommand(Mode.FAST, restore=(RestoreTask(0, 1, 1),)), OPEN)
        assert manager.wait_idle(TIMEOUT_S)
    assert not results[0].ok
    assert "map(8192 bytes): no" in str(results[0].error)


def test_checking_then_allocating_leaves_a_partial_allocation() -> None:
    """kvcached: an allocation that failed half way leaked what it had taken."""
    pool, manager = elastic_pool()
    promised = pool.get_num_free_blocks()
    with pytest.raises(ValueError, match="Cannot get"):
        pool.get_new_blocks(promised + 1)
    assert manager.ledger.fully_backed, "a refused allocation lent memory"
    assert pool.get_num_free_blocks() == promised
    assert len(pool.get_new_blocks(promised)) == promised


def test_driver_calls_on_the_way_to_a_block(build: BuildRig) -> None:
    """kvcached: asking for free blocks called the driver, and TTFT tripled."""
    driver = RecordingDriver()
    with managed(build("fixed", driver=driver), lambda _: None) as manager:
        driver.calls.clear()
        pool, units = elastic_pool()
        pool.get_new_blocks(pool.get_num_free_blocks())
        command = units.plan_step(Pressure(pool.live_blocks, BASE_BLOCKS))
        assert command.zero == (2, 1, 0)
        manager.apply(command, OPEN)
        assert driver.calls == [], "switching to fast called the driver"


def test_blocks_that_look_soon_free_and_are_not() -> None:
    """vllm-ascend: blocks behind a fence were counted as free, and preemption never ended."""
    pool, manager = elastic_pool()
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    manager.plan_step(Pressure(0, BASE_BLOCKS))
    command = manager.plan_step(Pressure(0, BASE_BLOCKS))
    assert len(command.restore) == UNITS
    promised = pool.get_num_free_blocks()
    assert promised == BASE_BLOCKS - 1 + UNITS * BLOCKS_PER_UNIT
    assert len(pool.get_new_blocks(promised)) == promised
    assert len(manager.plan_step(Pressure(promised, BASE_BLOCKS)).cancel) == UNITS


def test_a_report_from_a_thread_that_the_canceller_waits_for(build: BuildRig) -> None:
    """kvcached: a callback on the allocator's thread deadlocked with the interpreter lock."""
    reporting, go_on = threading.Event(), threading.Event()

    def report(_: RestoreResult) -> None:
        reporting.set()
        assert go_on.wait(TIMEOUT_S)

    task = RestoreTask(0, 0, 1)
    with managed(build("fixed"), report) as manager:
        manager.apply(StepCommand(Mode.FAST, zero=(0,)), OPEN)
        manager.apply(StepCommand(Mode.FAST, restore=(task,)), OPEN)
        assert reporting.wait(TIMEOUT_S)
        cancelling = threading.Thread(
            target=manager.apply, args=(StepCommand(Mode.FAST, cancel=(task,), zero=(0,)), OPEN)
        )
        cancelling.start()
        go_on.set()
        cancelling.join(TIMEOUT_S)
        assert not cancelling.is_alive()
        assert not manager.region.unit_kv_view(0).any()


def test_a_tensor_in_the_region_that_nobody_restores(build: BuildRig) -> None:
    """vLLM: a tensor outside the list of saved ones came back from sleep as noise."""
    rig = build("fixed")
    rig.region.upload_all()
    for unit in range(rig.region.geometry.num_units):
        rig.region.unit_kv_view(unit).fill_(0xAA)
    assert not any(torch.equal(*pair) for pair in zip(rig.views, rig.weights, strict=True))
    rig.region.upload_all()
    assert rig.layers_intact()
    covered = torch.zeros(rig.arena.used_bytes, dtype=torch.bool)
    for entry in rig.arena.entries:
        assert not covered[entry.offset : entry.offset + entry.nbytes].any()
        covered[entry.offset : entry.offset + entry.nbytes] = True
    assert int((~covered).sum()) < 64 * len(rig.arena.entries), "more than alignment is unnamed"


def test_host_memory_that_never_comes_back(builder: BuildRig) -> None:
    """vLLM, torch_memory_saver, cuda-python: pinned memory and handles outlived their owner."""
    driver = HostDriver()
    for _ in range(3):
        rig = builder("any", driver=driver)
        held = driver.created_bytes
        assert held == rig.region.geometry.total_bytes
        rig.views.clear()
        rig.region.close()
        assert driver.created_bytes == 0
        assert rig.region.backup.nbytes == 0
