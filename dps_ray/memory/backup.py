"""Host copy of all residual bytes of a rank: where every restore reads from."""

import torch

from dps_ray.config import DpsConfigError
from dps_ray.memory.checksum import checksum64
from dps_ray.memory.driver import PhysicalHandle, VmmDriver, VmmError
from dps_ray.memory.numa import bytes_by_node

_MAX_EXTENT_BYTES = 16 << 20


class ResidualBackup:
    """Residual bytes in host memory, contiguous by residual offset, with a checksum per segment.

    The backup grows while weights are loaded, in extents mapped behind one reserved address range:
    it is never moved, and a segment is always one slice.

    Parameters
    ----------
    driver
        Driver of host memory.
    capacity_bytes
        Upper bound of the residual, bytes; takes address space only.
    device
        Driver of the memory that restores copy to: the backup lies near it, and is pinned for it.
    budget_bytes
        Host memory that may be taken, bytes; ``None`` for all there is.
    """

    def __init__(
        self,
        driver: VmmDriver,
        capacity_bytes: int,
        *,
        device: VmmDriver,
        budget_bytes: int | None = None,
    ) -> None:
        self._driver = driver
        self._device = device
        self._budget_bytes = budget_bytes
        granularity = driver.granularity_bytes
        self._extent_bytes = min(_MAX_EXTENT_BYTES, _round_up(capacity_bytes, granularity))
        self._range = driver.reserve(_round_up(capacity_bytes, self._extent_bytes))
        self._extents: list[PhysicalHandle] = []
        self._pinned: torch.Tensor | None = None
        self._segments: list[torch.Tensor] = []
        self._checksums: list[int] = []
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Host memory taken, bytes."""
        return len(self._extents) * self._extent_bytes

    @property
    def bytes_by_node(self) -> dict[int, int]:
        """Where the memory lies: bytes a NUMA node; empty where the kernel does not tell."""
        return bytes_by_node(self._range.address, self._range.nbytes)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Keep ``data`` (uint8, contiguous, any shape, any device) at a residual offset.

        Raises
        ------
        DpsConfigError
            When the host cannot hold it, or it exceeds the budget.
        """
        self._grow_to(offset + data.numel())
        target = self._driver.tensor(self._range.address + offset, data.numel())
        target.copy_(data.reshape(-1))

    def seal(self, used_bytes: int, segment_bytes: int) -> None:
        """Pin the first ``used_bytes``, cut them into segments and sum each.

        The last segment may be shorter. To be called once, after the last ``write``; again only
        when it has failed.

        Raises
        ------
        DpsConfigError
            When the host cannot pin that many bytes.
        """
        base = self._range.address
        # In one piece: a copy must not cross from one pinned piece to another.
        whole = self._driver.tensor(base, used_bytes)
        try:
            self._device.pin(whole)
        except VmmError as error:
            raise DpsConfigError(
                f"the host cannot pin the residual backup of {used_bytes} bytes ({error}): give "
                "the host more memory or a higher limit on locked memory, or split fewer layers "
                "with additional_config.dps.min_split_bytes"
            ) from error
        self._pinned = whole
        self._segments = [
            self._driver.tensor(base + start, min(segment_bytes, used_bytes - start))
            for start in range(0, used_bytes, segment_bytes)
        ]
        self._checksums = [checksum64(segment.numpy()) for segment in self._segments]

    def segment(self, index: int) -> torch.Tensor:
        """Bytes of one segment, 1-D uint8."""
        return self._segments[index]

    def checksum(self, index: int) -> int:
        """Checksum of one segment, taken by ``seal``."""
        return self._checksums[index]

    def close(self) -> None:
        """Give the memory back; views of it must not be used any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._segments.clear()
        if self._pinned is not None:
            self._device.unpin(self._pinned)
            self._pinned = None
        for index, extent in enumerate(self._extents):
            address = self._range.address + index * self._extent_bytes
            self._driver.unmap(address, self._extent_bytes)
            self._driver.release(extent)
        self._extents.clear()
        self._driver.free(self._range)

    def _grow_to(self, nbytes: int) -> None:
        while self.nbytes < nbytes:
            address = self._range.address + self.nbytes
            grown_bytes = self.nbytes + self._extent_bytes
            if self._budget_bytes is not None and grown_bytes > self._budget_bytes:
                raise DpsConfigError(
                    f"additional_config.dps.backup_budget_bytes is {self._budget_bytes}: the "
                    f"residual backup needs {grown_bytes} bytes or more; raise it, or split fewer "
                    "layers with additional_config.dps.min_split_bytes"
                )
            try:
                with self._device.near():
                    extent = self._driver.create(self._extent_bytes)
            except VmmError as error:
                raise DpsConfigError(
                    f"the host cannot hold a residual backup of {nbytes} bytes or more ({error}): "
                    "give the host more memory, or split fewer layers with "
                    "additional_config.dps.min_split_bytes"
                ) from error
            self._driver.map(address, extent)
            self._extents.append(extent)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
