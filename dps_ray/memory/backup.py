"""Host copy of all residual bytes of a rank: where every restore reads from."""

import torch

from dps_ray.config import DpsConfigError
from dps_ray.memory.checksum import checksum64
from dps_ray.memory.driver import PhysicalHandle, VmmDriver, VmmError

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
    """

    def __init__(self, driver: VmmDriver, capacity_bytes: int) -> None:
        self._driver = driver
        granularity = driver.granularity_bytes
        self._extent_bytes = min(_MAX_EXTENT_BYTES, _round_up(capacity_bytes, granularity))
        self._range = driver.reserve(_round_up(capacity_bytes, self._extent_bytes))
        self._extents: list[PhysicalHandle] = []
        self._segments: list[torch.Tensor] = []
        self._checksums: list[int] = []
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Host memory taken, bytes."""
        return len(self._extents) * self._extent_bytes

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Keep ``data`` (uint8, contiguous, any shape) at a residual offset, before ``seal``.

        Raises
        ------
        DpsConfigError
            When the host cannot hold it.
        """
        self._grow_to(offset + data.numel())
        target = self._driver.tensor(self._range.address + offset, data.numel())
        target.copy_(data.reshape(-1))

    def seal(self, used_bytes: int, segment_bytes: int) -> None:
        """Cut the first ``used_bytes`` into segments and sum each; the last may be shorter."""
        base = self._range.address
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
        for index, extent in enumerate(self._extents):
            address = self._range.address + index * self._extent_bytes
            self._driver.unmap(address, self._extent_bytes)
            self._driver.release(extent)
        self._extents.clear()
        self._driver.free(self._range)

    def _grow_to(self, nbytes: int) -> None:
        while self.nbytes < nbytes:
            address = self._range.address + self.nbytes
            try:
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
