"""How much memory this process may still take, as the kernel sees it."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory that can be taken without swapping or meeting the container's limit, bytes.

    The smaller of the host's ``MemAvailable`` and, in a container with a cgroup v2 limit, what is
    left of that limit once inactive file pages are dropped. Past it the kernel does not refuse
    memory, it kills the process.
    """
    host_bytes = _field(meminfo, "MemAvailable:") * 1024
    limit_file = cgroup / "memory.max"
    limit = limit_file.read_text().strip() if limit_file.exists() else "max"
    if limit == "max":
        return host_bytes
    used_bytes = int((cgroup / "memory.current").read_text())
    reclaimable_bytes = _field(cgroup / "memory.stat", "inactive_file")
    return max(0, min(host_bytes, int(limit) - used_bytes + reclaimable_bytes))


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(f"{path} has no field {name!r}")
