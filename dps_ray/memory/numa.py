"""Host memory close to a device: which CPUs are near it, and where pages have come to lie."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

logger = logging.getLogger("vllm.dps")

_NUMA_MAPS = Path("/proc/self/numa_maps")
_WORD_BITS = 64


def cpus_near(pci_bus_id: str, nvml: Any = pynvml) -> frozenset[int]:
    """CPUs of the NUMA node that a GPU hangs on; empty where the driver cannot tell.

    Parameters
    ----------
    pci_bus_id
        As CUDA names it, ``domain:bus:device.function``.
    nvml
        The ``pynvml`` module.
    """
    words = -(-(os.cpu_count() or 1) // _WORD_BITS)
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            mask = nvml.nvmlDeviceGetCpuAffinity(handle, words)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        logger.warning("dps: the CPUs near GPU %s are not known (%s)", pci_bus_id, error)
        return frozenset()
    return frozenset(
        word * _WORD_BITS + bit
        for word, bits in enumerate(mask)
        for bit in range(_WORD_BITS)
        if bits >> bit & 1
    )


@contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Keep the calling thread on ``cpus`` meanwhile: Linux takes memory from the node it runs on.

    CPUs the process may not use are left out; where none remains, nothing changes.
    """
    before = os.sched_getaffinity(0)
    wanted = cpus & before
    if not wanted:
        yield
        return
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bytes_by_node(address: int, nbytes: int, numa_maps: Path = _NUMA_MAPS) -> dict[int, int]:
    """How many bytes of ``[address, address + nbytes)`` lie on each NUMA node.

    Whole mappings that start in the range are counted; pages the process never touched through
    them, and everything on a kernel without ``numa_maps``, are not.
    """
    nodes = Counter[int]()
    if not numa_maps.exists():
        return {}
    for line in numa_maps.read_text().splitlines():
        start, _, rest = line.partition(" ")
        if address <= int(start, 16) < address + nbytes:
            size = re.search(r"kernelpagesize_kB=(\d+)", rest)
            page_bytes = int(size[1]) * 1024 if size else os.sysconf("SC_PAGESIZE")
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", rest):
                nodes[int(node)] += int(pages) * page_bytes
    return dict(nodes)
