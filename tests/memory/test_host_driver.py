"""The host driver on real memory."""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dps_ray.memory.driver import VmmError
from dps_ray.memory.host_driver import HostDriver
from dps_ray.memory.host_memory import available_bytes

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    assert driver.created_bytes == 0, "the test left memory behind"


def resident_bytes() -> int:
    """Of all drivers' mappings, counted page by page: the process's own sum may lag behind."""
    _, *mappings = re.split(r"/memfd:dps.*\n", Path("/proc/self/smaps").read_text())
    sizes = (re.search(r"^Rss: +(\d+) kB$", mapping, re.MULTILINE) for mapping in mappings)
    return sum(int(size[1]) * 1024 for size in sizes if size)


def driver_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:dps")


def test_everything_returns_to_the_baseline(driver: HostDriver) -> None:
    # Else what an earlier test left to the collector is given back amid this one.
    gc.collect()
    files, mappings = len(os.listdir("/proc/self/fd")), driver_mappings()
    resident = resident_bytes()
    for _ in range(2):
        reserved = driver.reserve(8 << 20)
        handles = [driver.create(1 << 20) for _ in range(8)]
        for index, handle in enumerate(handles):
            driver.map(reserved.address + (index << 20), handle)
        driver.tensor(reserved.address, 8 << 20).fill_(1)
        assert resident_bytes() == resident + (8 << 20)
        assert driver_mappings() > mappings
        for index, handle in enumerate(handles):
            driver.unmap(reserved.address + (index << 20), 1 << 20)
            driver.release(handle)
        driver.free(reserved)
        assert resident_bytes() == resident
        assert driver_mappings() == mappings
        assert len(os.listdir("/proc/self/fd")) == files


def test_released_memory_is_given_back_while_other_handles_live(driver: HostDriver) -> None:
    kept, dropped = driver.create(PAGE), driver.create(4 << 20)
    blocks = os.fstat(driver._fd).st_blocks
    driver.release(dropped)
    assert os.fstat(driver._fd).st_blocks <= blocks - (4 << 20) // 512
    driver.release(kept)


def test_more_memory_than_there_is_is_refused_before_anything_is_taken(driver: HostDriver) -> None:
    nbytes = (available_bytes() // PAGE + (1 << 20)) * PAGE
    with pytest.raises(VmmError, match=rf"create\({nbytes} bytes\): only \d+ bytes are available"):
        driver.create(nbytes)
    assert driver.created_bytes == 0


@pytest.mark.parametrize(
    ("limit", "expected_bytes"),
    [("max", 4096 * 1024), ("1000000", 1000000 - 700000 + 50000), ("600000", 0)],
)
def test_available_memory_is_the_smaller_of_host_and_container(
    tmp_path: Path, limit: str, expected_bytes: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999 kB\nMemAvailable:    4096 kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    assert available_bytes(meminfo, tmp_path) == expected_bytes
    assert available_bytes(meminfo, tmp_path / "no-cgroup") == 4096 * 1024
