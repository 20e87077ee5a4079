"""The contract of a virtual-memory driver: addresses, physical memory, and what maps where.

Calls come in two kinds. *Prepare* calls (``create``) take physical memory and may fail for lack
of it; they touch no address. *Commit* calls (``map``, ``unmap``) change what stands behind an
address and never take memory, so a caller that prepares everything first can roll back before any
address has changed. One handle may be mapped at several addresses: all of them show the same bytes.

``map`` and ``unmap`` do not wait for running work. The caller makes sure that nothing in flight
uses the addresses (safety rules 2 and 3 in the README). Calls are not thread-safe against each
other; ``SharedRegion`` serialises them.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


class VmmError(RuntimeError):
    """A refused driver call; the message names the call, the sizes and the system's reason."""

    def __init__(self, call: str, sizes: str, reason: str) -> None:
        super().__init__(f"{call}({sizes}): {reason}")
        self.call = call
        self.reason = reason


@dataclass(frozen=True, slots=True)
class VirtualRange:
    """Reserved address space; nothing stands behind it until something is mapped."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PhysicalHandle:
    """Physical memory of a driver; ``value`` means something to that driver alone."""

    value: int
    nbytes: int


class Fence(Protocol):
    """A point in some order of work, for example the end of every step scheduled so far."""

    def wait(self) -> None:
        """Return, on the host, once it has been reached."""


class Executor(Protocol):
    """An ordered queue of memory operations: the calling thread on a host, a stream on a GPU.

    Work of one executor runs in the order of the calls. Across executors there is no order but
    ``synchronize`` and fences.
    """

    depth: int
    """Copies worth having queued: one, or one more behind it that hides the time it takes to issue.
    A steal waits for this many at most."""

    def mark(self) -> Fence:
        """The point after all work given to this executor so far."""

    def wait_for(self, fence: Fence) -> None:
        """Hold back all later work of this executor until ``fence`` is reached.

        A stream waits without the host; a host executor waits in the calling thread.
        """

    def zero(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` (1-D uint8, contiguous) with zeros."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between equally long 1-D uint8 tensors that do not overlap."""

    def copy_summed(
        self, destination: torch.Tensor, source: torch.Tensor, first_row: int
    ) -> int | None:
        """Copy, and sum what is copied where that is cheaper than reading it again later.

        Returns
        -------
        int or None
            The share in ``checksum64``, from ``first_row`` on, of the bytes as they were stored;
            ``None`` where the copy is only queued.
        """

    def checksum(self, tensor: torch.Tensor) -> int:
        """``dps_ray.memory.checksum.checksum64`` of the bytes, after all earlier work here."""

    def synchronize(self) -> None:
        """Return when all work given to this executor has completed."""


class VmmDriver(Protocol):
    """Address ranges and physical memory of one device, for one process."""

    @property
    def granularity_bytes(self) -> int:
        """Every size and address given to the driver is a multiple of this, bytes."""

    @property
    def compute(self) -> Executor:
        """Runs in order with the forward passes."""

    @property
    def transfer(self) -> Executor:
        """Runs beside the forward passes."""

    @property
    def between_steps(self) -> Executor | None:
        """Copies for ``transfer`` in the steps' thread, between two of them.

        ``None`` where ``transfer`` leaves the cores alone that steps compute on.
        """

    def reserve(self, nbytes: int) -> VirtualRange:
        """Reserve address space; takes no memory."""

    def create(self, nbytes: int) -> PhysicalHandle:
        """Take physical memory now, or raise ``VmmError``; its content is undefined."""

    def map(self, address: int, handle: PhysicalHandle) -> None:
        """Put the whole of ``handle`` behind reserved addresses that have nothing behind them."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Take away what one ``map`` put there; the addresses stay reserved."""

    def release(self, handle: PhysicalHandle) -> None:
        """Give physical memory back; all its mappings must be gone."""

    def free(self, reserved: VirtualRange) -> None:
        """Give address space back; all mappings in it must be gone."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """View reserved addresses as a 1-D uint8 tensor that owns nothing and touches nothing."""

    def near(self) -> AbstractContextManager[None]:
        """Within this context, host memory that is taken lies close to the device."""

    def pin(self, host: torch.Tensor) -> None:
        """Let ``transfer`` read host bytes at link rate: they stay in memory until ``unpin``."""

    def unpin(self, host: torch.Tensor) -> None:
        """End what ``pin`` did; no copy from the bytes may be under way."""

    def close(self) -> None:
        """Give back what the driver itself holds. Everything created must be released before."""
