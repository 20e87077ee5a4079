"""The CUDA driver on a real device."""

import threading
from collections.abc import Iterator

import pytest
import torch

from dps_ray.commands import RestoreTask, StepCommand
from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.checksum import checksum64
from dps_ray.memory.cuda_driver import CudaDriver
from dps_ray.memory.driver import VmmError
from dps_ray.memory.geometry import plan_geometry
from dps_ray.memory.manager import MemoryManager
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.region import Binding, SharedRegion
from dps_ray.memory.restore_result import RestoreResult
from dps_ray.modes import Mode

UNITS = 8
UNIT_BYTES = 8 << 20
TIMEOUT_S = 30.0


def test_two_addresses_of_one_handle_show_the_same_bytes(driver: CudaDriver) -> None:
    nbytes = 4 * driver.granularity_bytes
    left, right, handle = driver.reserve(nbytes), driver.reserve(nbytes), driver.create(nbytes)
    driver.map(left.address, handle)
    driver.map(right.address, handle)
    pattern = torch.arange(nbytes, device="cuda").to(torch.uint8)
    driver.tensor(left.address, nbytes).copy_(pattern)
    assert torch.equal(driver.tensor(right.address, nbytes), pattern)
    torch.cuda.synchronize()
    for reserved in (left, right):
        driver.unmap(reserved.address, nbytes)
        driver.free(reserved)
    driver.release(handle)


def test_memory_returns_to_its_baseline(driver: CudaDriver) -> None:
    # The first round loads modules and scratch memory that stay.
    for round_ in range(3):
        before = driver.free_and_total_bytes()[0]
        region, _ = build(driver, "any")
        region.rebind(0, 3)
        region.close()
        if round_:
            assert driver.free_and_total_bytes()[0] == before


def test_more_memory_than_there_is_is_refused_with_what_is_free(driver: CudaDriver) -> None:
    _, total_bytes = driver.free_and_total_bytes()
    nbytes = (total_bytes // driver.granularity_bytes + 1) * driver.granularity_bytes
    with pytest.raises(VmmError, match=rf"cuMemCreate\({nbytes} bytes\): .*bytes are free"):
        driver.create(nbytes)


@pytest.mark.parametrize("nbytes", [8, 4096, 4104, 20_000, (9 << 20) + 8])
def test_the_device_sums_as_the_host_does(driver: CudaDriver, nbytes: int) -> None:
    host = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert driver.transfer.checksum(host.cuda()) == checksum64(host.numpy())


def build(driver: CudaDriver, binding: Binding) -> tuple[SharedRegion, torch.Tensor]:
    arena = ResidualArena(driver, 1 << 40)
    weight = torch.randint(1, 256, (UNITS * UNIT_BYTES - 640,), dtype=torch.uint8)
    arena.add("layer", weight.cuda())
    geometry = plan_geometry(
        kv_bytes=64 << 20,
        residual_bytes=arena.used_bytes,
        block_bytes=1 << 20,
        granularity_bytes=driver.granularity_bytes,
        unit_bytes=UNIT_BYTES,
    )
    region = SharedRegion(driver, arena, geometry, binding)
    region.upload_all()
    return region, weight


@pytest.fixture(params=["fixed", "any"])
def region(driver: CudaDriver, request: pytest.FixtureRequest) -> Iterator[SharedRegion]:
    made, _ = build(driver, request.param)
    yield made
    made.close()


def manage(region: SharedRegion, results: list[RestoreResult]) -> MemoryManager:
    pacer = Pacer(max_inflation=0.05, floor_bytes_per_s=1e9)
    return MemoryManager(
        region, pacer=pacer, chunk_bytes=1 << 20, verify=True, on_done=results.append
    )


def occupy_the_gpu() -> None:
    """Queue some tens of milliseconds of work on the current stream."""
    torch.cuda._sleep(50_000_000)


def test_a_late_kv_write_does_not_outlive_the_restore_behind_its_fence(
    region: SharedRegion,
) -> None:
    results: list[RestoreResult] = []
    manager = manage(region, results)
    manager.apply(StepCommand(Mode.FAST, zero=(2,)), region.driver.compute.mark())
    occupy_the_gpu()
    region.unit_kv_view(2).fill_(0xEE)
    fence = region.driver.compute.mark()
    manager.apply(StepCommand(Mode.FAST, restore=(RestoreTask(2, 2, 1),)), fence)
    assert manager.wait_idle(TIMEOUT_S)
    assert [result.ok for result in results] == [True]
    manager.verify_all()
    manager.close()


def test_a_stolen_unit_holds_nothing_of_the_restore_it_was_taken_from(
    region: SharedRegion,
) -> None:
    results: list[RestoreResult] = []
    manager = manage(region, results)
    units = tuple(range(UNITS))
    for epoch in range(1, 60):
        manager.apply(StepCommand(Mode.FAST, zero=units), region.driver.compute.mark())
        tasks = tuple(RestoreTask(unit, unit, epoch * UNITS + unit) for unit in units)
        manager.apply(StepCommand(Mode.FAST, restore=tasks), region.driver.compute.mark())
        threading.Event().wait(0.0002 * (epoch % 12))
        manager.apply(
            StepCommand(Mode.FAST, cancel=tasks, zero=units), region.driver.compute.mark()
        )
        for unit in units:
            assert not region.unit_kv_view(unit).any(), f"unit {unit} in round {epoch}"
    manager.close()


def test_views_can_be_captured_in_a_graph(driver: CudaDriver) -> None:
    region, weight = build(driver, "fixed")
    residual = driver.tensor(region._arena.address, weight.numel())
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    residual.sum()
    with torch.cuda.graph(graph):
        total.copy_(residual.sum())
    graph.replay()
    assert int(total) == int(weight.to(torch.int64).sum())
    region.unit_kv_view(0).zero_()
    graph.replay()
    assert int(total) == int(weight[UNIT_BYTES:].to(torch.int64).sum())
    del graph
    region.close()
