"""The CUDA driver over recorded calls: order, arguments, lifetimes, and refusals at every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import cuda.bindings.driver as real
import pytest
import torch

from dps_ray.config import DpsConfigError
from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.cuda_driver import CudaDriver
from dps_ray.memory.driver import VmmError
from dps_ray.memory.drivers import open_driver, planned_granularity_bytes
from dps_ray.memory.geometry import plan_geometry
from dps_ray.memory.region import SharedRegion

from .fake_cuda import COMPUTE_STREAM, FakeCuda, FakeTorch

GRANULE = 4096
UNITS = 4


def open_cuda(fake: FakeCuda) -> CudaDriver:
    return CudaDriver(0, bindings=fake, torch_side=FakeTorch(fake))


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    yield fake
    assert not fake.leaks, "the test left something behind"


def build_region(driver: CudaDriver, arena: ResidualArena) -> SharedRegion:
    geometry = plan_geometry(
        kv_bytes=10 * GRANULE,
        residual_bytes=arena.used_bytes,
        block_bytes=GRANULE,
        granularity_bytes=driver.granularity_bytes,
        unit_bytes=2 * GRANULE,
    )
    region = SharedRegion(driver, arena, geometry, "any")
    try:
        region.upload_all()
    except VmmError:
        region.close()
        raise
    return region


def load(driver: CudaDriver) -> tuple[ResidualArena, torch.Tensor]:
    arena = ResidualArena(driver, 1 << 20)
    weight = torch.randint(1, 256, (UNITS * 2 * GRANULE,), dtype=torch.uint8)
    arena.add("layer", weight)
    return arena, weight


def test_the_granularity_is_the_devices(fake: FakeCuda) -> None:
    fake.granularity_bytes = 2 << 20
    driver = open_cuda(fake)
    assert driver.granularity_bytes == 2 << 20
    with pytest.raises(VmmError, match=r"create\(4096 bytes\): not a positive multiple of 2097152"):
        driver.create(4096)
    driver.close()
    driver.close()


def test_a_mapping_is_whole_and_access_follows_it(fake: FakeCuda) -> None:
    driver = open_cuda(fake)
    reserved, handle = driver.reserve(4 * GRANULE), driver.create(2 * GRANULE)
    fake.calls.clear()
    driver.map(reserved.address + GRANULE, handle)
    target = reserved.address + GRANULE
    assert fake.calls == [
        ("cuMemMap", target, 2 * GRANULE, 0, handle.value),
        ("cuMemSetAccess", target, 2 * GRANULE),
    ]
    driver.unmap(target, 2 * GRANULE)
    driver.release(handle)
    driver.free(reserved)
    assert fake.names()[2:] == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
    driver.close()


def test_a_refused_access_takes_the_mapping_back(fake: FakeCuda) -> None:
    driver = open_cuda(fake)
    reserved, handle = driver.reserve(GRANULE), driver.create(GRANULE)
    fake.refuse("cuMemSetAccess", status="CUDA_ERROR_INVALID_DEVICE")
    with pytest.raises(VmmError, match=r"cuMemSetAccess\(4096 bytes at 0x.*INVALID_DEVICE"):
        driver.map(reserved.address, handle)
    driver.map(reserved.address, handle)
    driver.unmap(reserved.address, GRANULE)
    driver.release(handle)
    driver.free(reserved)
    driver.close()


def test_lack_of_memory_is_told_with_what_is_free_and_nothing_is_taken(fake: FakeCuda) -> None:
    fake.device_bytes = 10 * GRANULE
    driver = open_cuda(fake)
    kept = driver.create(4 * GRANULE)
    message = r"cuMemCreate\(32768 bytes\): .*OUT_OF_MEMORY \(24576 of 40960 bytes are free\)"
    with pytest.raises(VmmError, match=message):
        driver.create(8 * GRANULE)
    assert driver.created_bytes == 4 * GRANULE
    driver.release(kept)
    assert driver.free_and_total_bytes() == (10 * GRANULE, 10 * GRANULE)
    driver.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA driver")
def test_a_machine_without_a_cuda_driver_is_named_in_one_line() -> None:
    with pytest.raises(DpsConfigError, match=r"device 0 cannot be driven \(cuInit\(0\)") as caught:
        open_driver("cuda", 0)
    assert "\n" not in str(caught.value)


def test_plans_are_made_with_the_granularity_the_device_will_have(fake: FakeCuda) -> None:
    fake.granularity_bytes = 2 << 20
    driver = open_cuda(fake)
    assert planned_granularity_bytes("cuda") == driver.granularity_bytes
    assert planned_granularity_bytes("host") == open_driver("host", 0).granularity_bytes
    driver.close()


def test_each_thread_enters_the_context_once(fake: FakeCuda) -> None:
    driver = open_cuda(fake)
    for _ in range(3):
        driver.release(driver.create(GRANULE))
    assert fake.names().count("cuCtxSetCurrent") == 1
    driver.close()


def test_zeroing_runs_on_the_stream_of_the_forward_pass_and_copies_on_another(
    fake: FakeCuda,
) -> None:
    driver = open_cuda(fake)
    region = build_region(driver, load(driver)[0])
    fake.calls.clear()
    driver.compute.zero(region.unit_kv_view(0))
    driver.transfer.copy(region.segment_view(1), region.backup.segment(1))
    zeroed, copied = fake.calls
    assert (zeroed[0], zeroed[-1]) == ("cuMemsetD8Async", COMPUTE_STREAM)
    assert (copied[0], copied[-1] == COMPUTE_STREAM) == ("cuMemcpyAsync", False)
    region.close()
    driver.close()


def test_the_backup_is_pinned_once_and_every_restore_reads_pinned_bytes(fake: FakeCuda) -> None:
    driver = open_cuda(fake)
    arena, weight = load(driver)
    region = build_region(driver, arena)
    pinned = [call for call in fake.calls if call[0] == "cuMemHostRegister"]
    assert [call[2] for call in pinned] == [weight.numel()]
    assert fake.pageable_copies == 0
    assert torch.equal(driver.tensor(arena.address, weight.numel()), weight)
    region.close()
    driver.close()


def test_a_host_that_cannot_pin_is_refused_with_its_limits(fake: FakeCuda) -> None:
    driver = open_cuda(fake)
    arena, _ = load(driver)
    fake.refuse("cuMemHostRegister", status="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DpsConfigError) as caught:
        build_region(driver, arena)
    message = str(caught.value)
    assert "cannot pin the residual backup of 32768 bytes" in message
    assert "CUDA_ERROR_OUT_OF_MEMORY" in message
    assert "bytes of host memory are free, locked memory (ulimit -l):" in message
    assert "\n" not in message
    build_region(driver, arena).close()
    driver.close()


def test_memory_is_back_at_its_baseline_after_teardown(fake: FakeCuda) -> None:
    driver = open_cuda(fake)
    baseline = driver.free_and_total_bytes()
    arena, _ = load(driver)
    region = build_region(driver, arena)
    region.rebind(0, 2)
    assert driver.free_and_total_bytes() < baseline
    fake.calls.clear()
    region.close()
    names = fake.names()
    assert names[:2] == ["cuCtxSynchronize", "cuStreamSynchronize"], "work may still be under way"
    assert names.index("cuMemRelease") > max(
        index for index, name in enumerate(names) if name == "cuMemUnmap"
    )
    assert driver.free_and_total_bytes() == baseline
    driver.close()


def calls_of_a_life() -> list[tuple[str, int]]:
    """Every call from opening to a filled region, as (name, how many of it came before)."""
    fake = FakeCuda()
    driver = open_cuda(fake)
    region = build_region(driver, load(driver)[0])
    seen: dict[str, int] = {}
    numbered = []
    for name in fake.names():
        numbered.append((name, seen.get(name, 0)))
        seen[name] = seen.get(name, 0) + 1
    region.close()
    driver.close()
    return numbered


@pytest.mark.parametrize(("name", "nth"), calls_of_a_life())
def test_a_refusal_at_any_call_is_raised_with_its_name_and_leaves_nothing(
    fake: FakeCuda, name: str, nth: int
) -> None:
    fake.refuse(name, nth)

    def live() -> None:
        with ExitStack() as closing:
            driver = open_cuda(fake)
            closing.callback(driver.close)
            arena, _ = load(driver)
            closing.callback(arena.close)
            build_region(driver, arena)

    with pytest.raises((VmmError, DpsConfigError), match=rf"{name}\(.*CUDA_ERROR_UNKNOWN"):
        live()


class AskingTheBindings(FakeCuda):
    """Gives every call to the real bindings first, which convert its arguments, then need a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.converted: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def ask_first(*arguments: Any) -> Any:
            with pytest.raises(RuntimeError, match="driver library"):
                getattr(real, name)(*arguments)
            self.converted.add(name)
            return found(*arguments)

        return ask_first


@pytest.mark.skipif(torch.cuda.is_available(), reason="the calls would reach the device")
def test_the_real_bindings_take_every_argument_that_is_given() -> None:
    fake = AskingTheBindings()
    driver = open_cuda(fake)
    region = build_region(driver, load(driver)[0])
    driver.compute.zero(region.unit_kv_view(0))
    driver.transfer.wait_for(driver.compute.mark())
    driver.transfer.copy(region.segment_view(0), region.backup.segment(0))
    driver.transfer.mark().wait()
    driver.free_and_total_bytes()
    region.close()
    driver.close()
    assert fake.converted == {name for name in vars(FakeCuda) if name.startswith("cu")}
    assert not fake.leaks
