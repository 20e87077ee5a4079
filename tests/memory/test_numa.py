"""Host memory close to a device."""

import os
from pathlib import Path

import pytest

from dps_ray.memory.numa import bytes_by_node, cpus_near, running_on


class FakeNvml:
    """As much of pynvml as is asked: one GPU whose CPUs are 0-3 and 65."""

    class NVMLError(Exception):
        pass

    def __init__(self, refuse: str | None = None) -> None:
        self.refuse = refuse
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.refuse:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:  # noqa: N802
        self._call("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._call("shutdown")

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:  # noqa: N802
        self._call("handle")
        return bus_id

    def nvmlDeviceGetCpuAffinity(self, handle: str, words: int) -> list[int]:  # noqa: N802
        assert handle == "0000:1B:00.0"
        assert words * 64 >= (os.cpu_count() or 1)
        self._call("affinity")
        return [0b1111, 0b10]


def test_the_cpus_near_a_gpu_are_read_from_its_mask() -> None:
    nvml = FakeNvml()
    assert cpus_near("0000:1B:00.0", nvml) == {0, 1, 2, 3, 65}
    assert nvml.calls == ["init", "handle", "affinity", "shutdown"]


@pytest.mark.parametrize("refused", ["init", "handle", "affinity"])
def test_a_driver_that_cannot_tell_is_a_warning_and_no_preference(
    refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml(refused)
    assert cpus_near("0000:1B:00.0", nvml) == frozenset()
    assert "the CPUs near GPU 0000:1B:00.0 are not known" in caplog.text
    assert nvml.calls.count("init") - nvml.calls.count("shutdown") == (refused == "init")


def test_the_thread_is_moved_only_meanwhile() -> None:
    before = os.sched_getaffinity(0)
    wanted = frozenset({min(before)})
    with running_on(wanted):
        assert os.sched_getaffinity(0) == wanted
    assert os.sched_getaffinity(0) == before


def test_cpus_the_process_may_not_use_change_nothing() -> None:
    before = os.sched_getaffinity(0)
    with running_on(frozenset({100_000})):
        assert os.sched_getaffinity(0) == before
    with running_on(frozenset()):
        assert os.sched_getaffinity(0) == before


def test_bytes_are_counted_by_node_within_the_range(tmp_path: Path) -> None:
    maps = tmp_path / "numa_maps"
    maps.write_text(
        "00001000 default file=/x mapped=2 N0=2 kernelpagesize_kB=4\n"
        "00010000 default anon=9 dirty=9 N0=4 N1=5 kernelpagesize_kB=4\n"
        "00200000 default huge anon=1 N1=1 kernelpagesize_kB=2048\n"
        "00400000 default anon=7 N2=7 kernelpagesize_kB=4\n"
    )
    assert bytes_by_node(0x10000, 0x3F0000, maps) == {0: 4 * 4096, 1: 5 * 4096 + (2 << 20)}
    assert bytes_by_node(0x10000, 0x3F0000, tmp_path / "none") == {}
