"""Links of the soak: they stall and damage what goes over, and may run late as a GPU's does."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from dps_ray.checks.soak_point import Point
from dps_ray.memory.checksum import checksum64
from dps_ray.memory.host_driver import HostExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from dps_ray.memory.driver import Fence

STALL_S = 3e-3
"""Long enough for several steps to pass amid a copy."""


class FlakyLink(HostExecutor):
    """Copies for real, in halves; stalls between those of the next copy, or damages it, if told."""

    def __init__(self) -> None:
        super().__init__()
        self.damage_next = False
        self.stall_next = False
        self._steps_thread = threading.get_ident()
        self.sliced_bytes = 0
        """Of those copied: by the thread that runs the steps."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(destination, self._delivered(source))

    def copy_summed(
        self, destination: torch.Tensor, source: torch.Tensor, first_row: int
    ) -> int | None:
        """Sums what is stored, on its way, as the real one does."""
        delivered = self._delivered(source)
        self._copy(destination, delivered)
        return checksum64(delivered.numpy(), first_row)

    def stop(self) -> None:
        """End whatever runs the copies."""

    def _delivered(self, source: torch.Tensor) -> torch.Tensor:
        if not self.damage_next:
            return source
        self.damage_next = False
        source = source.clone()
        source[-1] ^= 0x10
        return source

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if threading.get_ident() == self._steps_thread:
            self.sliced_bytes += source.numel()
        half = source.numel() // 2
        super().copy(destination[:half], source[:half])
        if self.stall_next:
            self.stall_next = False
            time.sleep(STALL_S)
        super().copy(destination[half:], source[half:])


class QueuedLink(FlakyLink):
    """Queues copies and returns at once, as a stream does; a thread of its own runs them."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="soak-link", daemon=True)
        self._thread.start()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._work.put(lambda: FlakyLink.copy(self, destination, source))

    def copy_summed(
        self, destination: torch.Tensor, source: torch.Tensor, first_row: int
    ) -> int | None:
        self.copy(destination, source)
        return None

    def checksum(self, tensor: torch.Tensor) -> int:
        self.synchronize()
        return super().checksum(tensor)

    def mark(self) -> Fence:
        landed = Point()
        self._work.put(landed.set)
        return landed

    def wait_for(self, fence: Fence) -> None:
        self._work.put(fence.wait)

    def synchronize(self) -> None:
        self.mark().wait()

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
