"""Whose status page is whose: a page lives as long as the process that its first cells name."""

import contextlib
import functools
import os
import weakref
from collections.abc import Collection
from pathlib import Path

import numpy as np
import psutil

_FOLDER = Path("/dev/shm")
_PREFIX = "dps-"
OWNER_CELLS = ("owner_pid", "owner_pid_namespace")
"""What stands first on every page, as float64."""


def page_path(key: str) -> Path:
    """Where the page named by ``key`` is."""
    return _FOLDER / f"{_PREFIX}{key}"


def this_process() -> tuple[float, float]:
    """The owner's cells where this process is the owner."""
    return float(os.getpid()), _pid_namespace()


def remove_orphans() -> None:
    """Unlink pages of this PID namespace whose owner no longer runs."""
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        owner = _owner_of(path)
        if owner is not None and owner[1] == _pid_namespace() and not _alive(owner[0]):
            path.unlink(missing_ok=True)


@functools.cache
def remove_orphans_at_exit() -> None:
    """Let this process, which is about to start an engine, remove orphans when it ends.

    An engine core that has failed tells its client, turns the handling of SIGTERM off and only then
    cleans up; a client that ends meanwhile sends SIGTERM, which leaves the page behind. Finalizers
    run in the reverse order of their creation: the engine's, which waits for the core, comes first.
    """
    weakref.finalize(page_path, remove_orphans)


def keys_owned_by(processes: Collection[int]) -> set[str]:
    """Keys of the pages whose owners are among these processes."""
    return {
        path.name.removeprefix(_PREFIX)
        for path in _FOLDER.glob(f"{_PREFIX}*")
        if (owner := _owner_of(path)) is not None and owner[0] in processes
    }


def _owner_of(path: Path) -> tuple[int, float] | None:
    """Process and PID namespace; ``None`` where there is no such page, or no longer."""
    with contextlib.suppress(OSError):
        cells = np.fromfile(path, dtype=np.float64, count=len(OWNER_CELLS))
        if len(cells) == len(OWNER_CELLS):
            return int(cells[0]), float(cells[1])
    return None


def _pid_namespace() -> float:
    return float(os.stat("/proc/self/ns/pid").st_ino)


def _alive(pid: int) -> bool:
    try:
        # A container's first process may never ask for the exit status of what it adopts.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
