"""What every driver promises: the host driver and the CUDA driver over recorded calls."""

from collections.abc import Iterator

import pytest
import torch

from dps_ray.memory.checksum import checksum64
from dps_ray.memory.cuda_driver import CudaDriver
from dps_ray.memory.driver import VmmError
from dps_ray.memory.host_driver import HostDriver

from .fake_cuda import FakeCuda, FakeTorch

Driver = HostDriver | CudaDriver


@pytest.fixture(params=["host", "cuda"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param == "host":
        yield (made := HostDriver())
        made.close()
        return
    fake = FakeCuda()
    yield (cuda := CudaDriver(0, bindings=fake, torch_side=FakeTorch(fake)))
    cuda.close()
    assert not fake.leaks


def test_two_ranges_on_one_handle_show_the_same_bytes(driver: Driver) -> None:
    granule = driver.granularity_bytes
    left, right = driver.reserve(2 * granule), driver.reserve(4 * granule)
    handle = driver.create(2 * granule)
    driver.map(left.address, handle)
    driver.map(right.address + granule, handle)
    seen_left = driver.tensor(left.address, 2 * granule)
    seen_right = driver.tensor(right.address + granule, 2 * granule)
    seen_left.copy_(torch.randint(0, 256, (2 * granule,), dtype=torch.uint8))
    assert torch.equal(seen_left, seen_right)
    seen_right[granule] = seen_left[granule] ^ 0xFF
    assert torch.equal(seen_left, seen_right)
    driver.unmap(left.address, 2 * granule)
    driver.unmap(right.address + granule, 2 * granule)
    driver.release(handle)
    driver.free(left)
    driver.free(right)


def test_remapping_shows_the_other_handle_at_the_same_address(driver: Driver) -> None:
    granule = driver.granularity_bytes
    reserved = driver.reserve(granule)
    handles = [driver.create(granule) for _ in range(2)]
    for value, handle in enumerate(handles):
        driver.map(reserved.address, handle)
        driver.tensor(reserved.address, granule).fill_(value + 1)
        driver.unmap(reserved.address, granule)
    for value, handle in enumerate(handles):
        driver.map(reserved.address, handle)
        assert bool((driver.tensor(reserved.address, granule) == value + 1).all())
        driver.unmap(reserved.address, granule)
        driver.release(handle)
    driver.free(reserved)


def test_each_misuse_is_refused_with_the_calls_name_and_sizes(driver: Driver) -> None:
    granule = driver.granularity_bytes
    reserved = driver.reserve(2 * granule)
    handle, other = driver.create(granule), driver.create(2 * granule)
    with pytest.raises(VmmError, match=r"create\(100 bytes\): not a positive multiple of"):
        driver.create(100)
    with pytest.raises(VmmError, match=r"reserve\(0 bytes\)"):
        driver.reserve(0)
    with pytest.raises(VmmError, match=rf"map\({2 * granule} bytes at .*not reserved"):
        driver.map(reserved.address + granule, other)
    driver.map(reserved.address + granule, handle)
    with pytest.raises(VmmError, match="already mapped"):
        driver.map(reserved.address, other)
    with pytest.raises(VmmError, match=r"release\(\d+ bytes\): still mapped"):
        driver.release(handle)
    with pytest.raises(VmmError, match=r"free\(.*still mapped"):
        driver.free(reserved)
    with pytest.raises(VmmError, match=r"unmap\(.*no such mapping"):
        driver.unmap(reserved.address, granule)
    driver.unmap(reserved.address + granule, granule)
    for created in (handle, other):
        driver.release(created)
        with pytest.raises(VmmError, match="unknown handle"):
            driver.release(created)
        with pytest.raises(VmmError, match="unknown handle"):
            driver.map(reserved.address, created)
    driver.free(reserved)
    with pytest.raises(VmmError, match="not reserved"):
        driver.free(reserved)


def test_an_address_off_the_granularity_is_refused(driver: Driver) -> None:
    granule = driver.granularity_bytes
    reserved, handle = driver.reserve(2 * granule), driver.create(granule)
    with pytest.raises(VmmError, match=f"not a multiple of {granule}"):
        driver.map(reserved.address + granule // 2, handle)
    driver.release(handle)
    driver.free(reserved)


def test_a_view_of_reserved_addresses_needs_no_memory_behind_them(driver: Driver) -> None:
    reserved = driver.reserve(1 << 40)
    view = driver.tensor(reserved.address + 64, 1 << 20)
    assert view.dtype is torch.uint8
    assert view.view(1024, 1024).view(torch.float16).shape == (1024, 512)
    assert view.data_ptr() == reserved.address + 64
    driver.free(reserved)


@pytest.fixture
def backed(driver: Driver) -> Iterator[torch.Tensor]:
    """Eight granules of memory, mapped."""
    nbytes = 8 * driver.granularity_bytes
    reserved, handle = driver.reserve(nbytes), driver.create(nbytes)
    driver.map(reserved.address, handle)
    yield driver.tensor(reserved.address, nbytes)
    driver.compute.synchronize()
    driver.transfer.synchronize()
    driver.unmap(reserved.address, nbytes)
    driver.release(handle)
    driver.free(reserved)


def host_bytes(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def test_work_of_one_executor_runs_in_order(driver: Driver, backed: torch.Tensor) -> None:
    source = host_bytes(backed.numel())
    driver.transfer.zero(backed)
    driver.transfer.copy(backed, source)
    driver.transfer.zero(backed[:100])
    driver.transfer.synchronize()
    assert not backed[:100].any()
    assert torch.equal(backed[100:], source[100:])


def test_an_executor_that_waits_for_anothers_mark_runs_after_it(
    driver: Driver, backed: torch.Tensor
) -> None:
    source = host_bytes(backed.numel())
    driver.compute.zero(backed)
    fence = driver.compute.mark()
    driver.transfer.wait_for(fence)
    driver.transfer.copy(backed, source)
    driver.transfer.synchronize()
    driver.compute.synchronize()
    assert torch.equal(backed, source)


def test_a_mark_is_reached_when_the_work_before_it_is_done(
    driver: Driver, backed: torch.Tensor
) -> None:
    source = host_bytes(backed.numel())
    driver.transfer.copy(backed, source)
    driver.transfer.mark().wait()
    assert torch.equal(backed, source)


@pytest.mark.parametrize("nbytes", [8, 4096, 4104, 20_000, 32_768])
def test_the_checksum_of_device_bytes_is_that_of_the_hosts(
    driver: Driver, backed: torch.Tensor, nbytes: int
) -> None:
    source = host_bytes(nbytes)
    driver.transfer.copy(backed[:nbytes], source)
    assert driver.transfer.checksum(backed[:nbytes]) == checksum64(source.numpy())
    driver.transfer.copy(backed[:1], source[1:2])
    assert driver.transfer.checksum(backed[:nbytes]) != checksum64(source.numpy())


def test_a_driver_that_still_holds_memory_does_not_close(driver: Driver) -> None:
    handle = driver.create(driver.granularity_bytes)
    with pytest.raises(VmmError, match=rf"close\({handle.nbytes} bytes\): still reserved"):
        driver.close()
    driver.release(handle)


def test_copy_refuses_different_lengths(driver: Driver) -> None:
    with pytest.raises(ValueError, match="copy of 4 bytes into 3"):
        driver.transfer.copy(torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))
