"""A page of shared memory on which one engine's ranks, scheduler and server meet.

Ranks write how far each restore is; the scheduler reads that and publishes an ``EngineStatus``;
the server process reads the status and writes the operator's pin. Reading or writing costs
microseconds and needs no call into the engine. One writer per section, so no locks: the status
section carries a checksum, so that a reader knows a mix of two publications on any processor,
whatever order it sees their stores in. All other cells stand for themselves.

The first rank makes the page and the scheduler takes it over, because only those processes live as
long as the engine: a configuration may come from a process that ends before the engine starts.
"""

import atexit
import contextlib
import mmap
import os
import time
import uuid
import zlib
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dps_ray.config import DpsConfigError
from dps_ray.engine.page_owner import OWNER_CELLS, page_path, remove_orphans, this_process
from dps_ray.engine.rank_section import RANK_CELLS, RankSection
from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.permits import Permits
from dps_ray.status import EngineStatus

MAX_RANKS = 64

# Everything is a float64 cell: integers up to 2**53 are exact, and one type keeps the page simple.
_STATUS_FIELDS = tuple(field.name for field in fields(EngineStatus))
_STATUS_VALUES = attrgetter(*_STATUS_FIELDS[1:])
_FAULT_BYTES = 240
_HEADER = (
    *OWNER_CELLS,
    "pin_request",
    "restore_until_s",
    "fast_denied",
    "restores_stopped",
)
_ANY_TIME = 0.0
_PERMITS = slice(3 * 8, 6 * 8)
_NOTHING_ASKED = bytes(3 * 8)
_FREE, _HOLDING = Permits(), Permits(hold_full=True)
"""What a replica may on whose page no fleet has written."""
_STATUS_START = len(_HEADER)
_FAULT_START = _STATUS_START + len(_STATUS_FIELDS)
_CHECKSUM = _FAULT_START + _FAULT_BYTES // 8
_RANKS_START = _CHECKSUM + 1
_CELLS = _RANKS_START + MAX_RANKS * RANK_CELLS
_MODES = (Mode.FULL, Mode.FAST)
_PINS = (Pin.AUTO, Pin.FULL, Pin.FAST)
_UNKNOWN = float("nan")
_READ_ATTEMPTS = 1000
_READ_PAUSE_S = 0.001


class StatusPage:
    """One engine's page, named by its key; see the module's docstring for who writes what."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path = path
        self._memory = memory
        self._cells: NDArray[np.float64] = np.frombuffer(memory, dtype=np.float64)

    @classmethod
    def create(cls, key: str) -> Self:
        """Make the page of a new engine; pages whose owner is gone are removed on the way.

        Raises
        ------
        FileExistsError
            When there is one.
        """
        remove_orphans()
        path = page_path(key)
        header = np.array(this_process(), dtype=np.float64)
        # It appears under its name in one step: another rank may be about to open it.
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(header.tobytes())
            file.truncate(_CELLS * 8)
        try:
            os.link(draft, path)
        finally:
            draft.unlink()
        return cls.attach(key)

    @classmethod
    def join(cls, key: str) -> Self:
        """A rank's page: made by the rank that comes first, opened by the others."""
        try:
            return cls.create(key)
        except FileExistsError:
            return cls.attach(key)

    @classmethod
    def attach(cls, key: str) -> Self:
        """Open an existing page.

        Raises
        ------
        DpsConfigError
            When there is none: the engine does not run on this host.
        """
        path = page_path(key)
        try:
            with open(path, "r+b") as file:
                return cls(path, mmap.mmap(file.fileno(), _CELLS * 8))
        except FileNotFoundError:
            raise DpsConfigError(
                f"no status page {path}: the engine's processes must share one host and its "
                "/dev/shm; run all ranks of a replica on one node"
            ) from None

    def close(self) -> None:
        """Drop this process's mapping; the page stays for the others."""
        self._cells = np.empty(0)
        with contextlib.suppress(BufferError):
            self._memory.close()

    def adopt(self) -> None:
        """Make this process the owner, which unlinks the page when it ends."""
        self._cells[: len(OWNER_CELLS)] = this_process()
        atexit.register(self.remove)

    def remove(self) -> None:
        """Unlink the page (the owner's duty) and close it. Idempotent."""
        atexit.unregister(self.remove)
        self._path.unlink(missing_ok=True)
        self.close()

    # --- operator -> scheduler ---------------------------------------------------------------

    def set_pin(self, pin: Pin) -> None:
        """Ask the scheduler for a mode pin; it takes effect at its next step."""
        self._cells[2] = 1 + _PINS.index(pin)

    def requested_pin(self) -> Pin | None:
        """The latest pin asked for, or ``None`` when none was."""
        wanted = int(self._cells[2])
        return _PINS[wanted - 1] if wanted else None

    # --- fleet -> scheduler ------------------------------------------------------------------

    def set_permits(
        self, *, restore_until_s: float | None, fast: bool, stop_restores: bool = False
    ) -> None:
        """Tell the scheduler what the fleet allows; both are allowed on a new page.

        Parameters
        ----------
        restore_until_s
            Restores may begin until then, seconds of ``time.monotonic``, which is one clock for
            all processes of a host; ``None`` for any time.
        fast
            The replica may leave full mode.
        stop_restores
            Open restores end, and none begins.
        """
        self._cells[3] = _ANY_TIME if restore_until_s is None else max(restore_until_s, 1e-9)
        self._cells[4] = 0.0 if fast else 1.0
        self._cells[5] = 1.0 if stop_restores else 0.0

    def permits(self, *, hold_full: bool = False) -> Permits:
        """What the fleet allows at this moment, and what the engine's own requests do."""
        if self._memory[_PERMITS] == _NOTHING_ASKED:
            return _HOLDING if hold_full else _FREE
        until_s = float(self._cells[3])
        return Permits(
            restore=until_s == _ANY_TIME or time.monotonic() < until_s,
            fast=self._cells[4] == 0.0,
            stop=bool(self._cells[5] != 0.0),
            hold_full=hold_full,
        )

    # --- ranks -> scheduler ------------------------------------------------------------------

    def rank(self, rank: int) -> RankSection:
        """The section that rank ``rank`` writes."""
        start = _RANKS_START + rank * RANK_CELLS
        return RankSection(self._cells[start : start + RANK_CELLS])

    # --- scheduler -> everybody --------------------------------------------------------------

    def publish(self, status: EngineStatus) -> None:
        """Replace the published status; readers see the old one or the new one, never a mix."""
        values = [self._cells[_STATUS_START] + 1, *map(_encode, _STATUS_VALUES(status))]
        text = (status.fault or "").encode()[: _FAULT_BYTES - 1].ljust(_FAULT_BYTES, b"\0")
        content = np.array(values, dtype=np.float64).tobytes() + text
        section = content + np.float64(zlib.crc32(content)).tobytes()
        self._cells[_STATUS_START:_RANKS_START] = np.frombuffer(section, dtype=np.float64)

    def read(self) -> EngineStatus | None:
        """The latest status, or ``None`` before the first one.

        Raises
        ------
        RuntimeError
            When no whole publication can be seen for a second. It takes microseconds to write
            one, but the writer's process may lose the CPU meanwhile.
        """
        for _ in range(_READ_ATTEMPTS):
            section = self._cells[_STATUS_START:_RANKS_START].tobytes()
            content, checksum = section[:-8], section[-8:]
            if np.float64(zlib.crc32(content)).tobytes() == checksum:
                cells = np.frombuffer(content[:-_FAULT_BYTES], dtype=np.float64)
                return _decode(cells, content[-_FAULT_BYTES:])
            if not any(section):
                return None
            time.sleep(_READ_PAUSE_S)
        raise RuntimeError(f"status page {self._path} never settles: its writer died mid-write")


def _encode(value: object) -> float:
    if type(value) is int or type(value) is float:
        return value
    if value is None:
        return _UNKNOWN
    if isinstance(value, Mode):
        return float(_MODES.index(value))
    if isinstance(value, Pin):
        return float(_PINS.index(value))
    if isinstance(value, str):
        return 1.0
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"status field of type {type(value).__name__} has no place on the page")


def _decode(cells: NDArray[np.float64], text: bytes) -> EngineStatus:
    values: dict[str, object] = {}
    for field, cell in zip(fields(EngineStatus), cells.tolist(), strict=True):
        kind = field.type
        if field.name == "fault":
            values[field.name] = text.rstrip(b"\0").decode(errors="replace") or None
        elif kind is Mode:
            values[field.name] = _MODES[int(cell)]
        elif kind is Pin:
            values[field.name] = _PINS[int(cell)]
        elif cell != cell:
            values[field.name] = None
        elif kind is bool:
            values[field.name] = bool(cell)
        elif kind is int:
            values[field.name] = int(cell)
        else:
            values[field.name] = cell
    values["sequence"] = int(cells[0])
    return EngineStatus(**values)  # type: ignore[arg-type]
