"""One segment on its way back: how far it has come, and what has arrived."""

import time
from collections import deque
from typing import Self

import torch

from dps_ray.memory.checksum import ROW_BYTES
from dps_ray.memory.driver import Executor, Fence
from dps_ray.memory.region import SharedRegion


class SegmentCopy:
    """Copies one segment piece by piece, from where it stands.

    Parameters
    ----------
    destination, source
        1-D uint8, equally long.
    transfer
        Executor of the copies, unless another one is named.
    summed
        Sum the pieces while they are copied, where the executor can.
    """

    def __init__(
        self, destination: torch.Tensor, source: torch.Tensor, transfer: Executor, *, summed: bool
    ) -> None:
        self._destination, self._source = destination, source
        self._transfer = transfer
        self.nbytes = source.numel()
        self.copied_bytes = 0
        """Bytes given to the link."""
        self.resumed_bytes = 0
        """Those in place when the copy last went on after a hold."""
        self._sum: int | None = 0 if summed else None
        self._in_flight: deque[tuple[Fence, int, float]] = deque()
        """Fence, bytes and time of issue of each piece, oldest first."""
        self._landed_s = 0.0

    @classmethod
    def of(cls, region: SharedRegion, segment: int, *, summed: bool) -> Self:
        """The copy of a region's segment from the backup to its place."""
        place, backup = region.segment_view(segment), region.backup.segment(segment)
        return cls(place, backup, region.driver.transfer, summed=summed)

    @property
    def left_bytes(self) -> int:
        """Bytes not yet given to the link."""
        return self.nbytes - self.copied_bytes

    @property
    def checksum(self) -> int | None:
        """Checksum of all pieces, in whatever order of time; ``None`` where it was not taken."""
        return None if self._sum is None else self._sum % (1 << 64)

    def resume(self) -> None:
        """Go on after a hold: what is in place stays, and is read again before it is believed.

        The sum was taken as the pieces went over; steps have run beside them since.
        """
        self.resumed_bytes = self.copied_bytes
        if self.copied_bytes:
            self._sum = None

    def issue(self, nbytes: int, executor: Executor | None = None) -> Fence:
        """Give the next ``nbytes`` to the link; the point behind them."""
        executor = executor or self._transfer
        piece = slice(self.copied_bytes, self.copied_bytes + nbytes)
        began_s = time.monotonic()
        # Shares are sums over whole rows, so a piece must begin with one.
        if self._sum is not None and piece.start % ROW_BYTES == 0:
            share = executor.copy_summed(
                self._destination[piece], self._source[piece], piece.start // ROW_BYTES
            )
            self._sum = None if share is None else self._sum + share
        else:
            self._sum = None
            executor.copy(self._destination[piece], self._source[piece])
        self.copied_bytes = piece.stop
        fence = executor.mark()
        self._in_flight.append((fence, nbytes, began_s))
        return fence

    def land(self, allowed: int) -> list[tuple[int, float]]:
        """Wait until no more than ``allowed`` pieces are in flight, oldest first.

        Returns
        -------
        list
            Bytes of each piece that landed, and how long it had the link, seconds: since it was
            issued or, if that was later, since the piece before it landed.
        """
        landed = []
        while len(self._in_flight) > allowed:
            fence, nbytes, issued_s = self._in_flight.popleft()
            fence.wait()
            now_s = time.monotonic()
            landed.append((nbytes, now_s - max(issued_s, self._landed_s)))
            self._landed_s = now_s
        return landed
