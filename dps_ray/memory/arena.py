"""Places the residual bytes of every layer in one address range."""

from dataclasses import dataclass

import torch

from dps_ray.memory.backup import ResidualBackup
from dps_ray.memory.driver import VmmDriver
from dps_ray.memory.host_driver import HostDriver

ALIGNMENT_BYTES = 64
"""Layers start on a cache line, which also keeps every segment a whole number of 8-byte words."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Residual of one weight: ``nbytes`` at ``offset`` in the residual address range."""

    name: str
    offset: int
    nbytes: int


class ResidualArena:
    """Reserves the residual address range and fills it layer by layer while a model is loaded.

    ``add`` gives out views into addresses that have no memory behind them yet: the bytes go to the
    host backup alone. Touching a view before ``SharedRegion`` has been built and uploaded is a
    segmentation fault, so the engine runs fast mode until then.

    Parameters
    ----------
    driver
        Driver of the memory that the residual will live in.
    capacity_bytes
        Upper bound of the residual with its last unit rounded up, bytes. Takes address space only.
    backup_budget_bytes
        Host memory that the backup may take, bytes; ``None`` for all there is.
    """

    def __init__(
        self, driver: VmmDriver, capacity_bytes: int, *, backup_budget_bytes: int | None = None
    ) -> None:
        self.driver = driver
        granularity = driver.granularity_bytes
        self._range = driver.reserve(-(-capacity_bytes // granularity) * granularity)
        self.backup = ResidualBackup(
            HostDriver(), self._range.nbytes, device=driver, budget_bytes=backup_budget_bytes
        )
        self._entries: list[Entry] = []
        self._used_bytes = 0
        self._sealed = False
        self._closed = False

    @property
    def address(self) -> int:
        """Start of the residual address range."""
        return self._range.address

    @property
    def capacity_bytes(self) -> int:
        return self._range.nbytes

    @property
    def used_bytes(self) -> int:
        """Residual bytes placed so far, gaps for alignment included."""
        return self._used_bytes

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What lies where, in the order of the offsets."""
        return tuple(self._entries)

    def add(self, name: str, lower: torch.Tensor) -> torch.Tensor:
        """Back up ``lower`` and give it a place in the residual address range.

        Parameters
        ----------
        name
            Name of the weight, for messages.
        lower
            uint8, any shape and strides, at least one byte.

        Returns
        -------
        torch.Tensor
            uint8, contiguous, of ``lower``'s shape; not to be touched before the region is up.

        Raises
        ------
        DpsConfigError
            When the host cannot hold the backup.
        ValueError
            When the arena is sealed or full, or ``lower`` is empty or not uint8.
        """
        if self._sealed:
            raise ValueError(f"residual {name!r} comes after the shared region was built")
        if lower.dtype != torch.uint8 or lower.numel() == 0:
            raise ValueError(
                f"residual {name!r} is {lower.dtype} of {lower.numel()} elements: "
                "uint8 and at least one is needed"
            )
        offset, nbytes = self._used_bytes, lower.numel()
        end = -(-(offset + nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if end > self.capacity_bytes:
            raise ValueError(
                f"residual {name!r} of {nbytes} bytes at offset {offset} exceeds the reserved "
                f"{self.capacity_bytes} bytes of address space"
            )
        self.backup.write(offset, lower.contiguous())
        self._entries.append(Entry(name, offset, nbytes))
        self._used_bytes = end
        return self.driver.tensor(self.address + offset, nbytes).view(lower.shape)

    def seal(self, segment_bytes: int) -> None:
        """End loading: nothing more can be added, and the backup is cut into segments.

        Raises
        ------
        DpsConfigError
            When the host cannot pin the backup.
        """
        if not self._sealed:
            self.backup.seal(self._used_bytes, segment_bytes)
            self._sealed = True

    def close(self) -> None:
        """Give backup and address range back; no view may be used any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self.backup.close()
            self.driver.free(self._range)
