"""Virtual-memory driver on ordinary Linux memory: one memfd, mapped wherever it is needed.

All handles are pieces of one anonymous file. A file per handle would cost a descriptor each and
map no faster (2 against 9 microseconds to create, 0.9 ms per 4 MiB to give back, either way).
Pages are allocated by ``create``, so lack of memory is an error there and not a SIGBUS at some
later write.
"""

import ctypes
import itertools
import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from dps_kernels import zero_all

from dps_ray.memory.checksum import ROW_BYTES, checksum64, copy_checksum64
from dps_ray.memory.driver import Executor, Fence, PhysicalHandle, VirtualRange, VmmError
from dps_ray.memory.host_memory import available_bytes
from dps_ray.memory.mappings import Mappings

_NO_ACCESS = 0  # PROT_NONE, which the mmap module does not name
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_RESERVED_ONLY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    *[ctypes.c_int] * 3,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True, slots=True)
class Reached:
    """A fence of work that ran in the calling thread: it is over when the caller can ask."""

    def wait(self) -> None:
        return


class HostExecutor:
    """Runs every operation at once, in the calling thread, without the interpreter lock.

    Copies stay on one core; torch would spread a background copy over the cores that the forward
    pass computes on.
    """

    depth = 1

    def zero(self, tensor: torch.Tensor) -> None:
        zero_all(tensor)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if destination.numel() != source.numel():
            raise ValueError(f"copy of {source.numel()} bytes into {destination.numel()}")
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel())

    def copy_summed(
        self, destination: torch.Tensor, source: torch.Tensor, first_row: int
    ) -> int | None:
        target, origin = np.asarray(destination), np.asarray(source)
        whole = origin.size // ROW_BYTES * ROW_BYTES
        share = copy_checksum64(target[:whole], origin[:whole], first_row)
        if whole < origin.size:
            self.copy(destination[whole:], source[whole:])
            share += checksum64(target[whole:], first_row + whole // ROW_BYTES)
        return share % (1 << 64)

    def checksum(self, tensor: torch.Tensor) -> int:
        return checksum64(np.asarray(tensor))

    def mark(self) -> Fence:
        return Reached()

    def wait_for(self, fence: Fence) -> None:
        fence.wait()

    def synchronize(self) -> None:
        return


class HostDriver:
    """``VmmDriver`` over memfd and mmap. See the protocol for the contract of each method."""

    def __init__(self) -> None:
        self._fd = -1
        self._ids = itertools.count()
        self._offsets: dict[PhysicalHandle, int] = {}
        self._end = 0
        self._book = Mappings(mmap.PAGESIZE)
        self._executor = HostExecutor()

    @property
    def granularity_bytes(self) -> int:
        return mmap.PAGESIZE

    @property
    def compute(self) -> Executor:
        return self._executor

    @property
    def transfer(self) -> Executor:
        return self._executor

    @property
    def between_steps(self) -> Executor | None:
        return self._executor

    @property
    def created_bytes(self) -> int:
        """Physical memory held by this driver's handles, bytes."""
        return self._book.created_bytes

    def reserve(self, nbytes: int) -> VirtualRange:
        self._book.check_size("reserve", nbytes)
        address = _mmap("reserve", 0, nbytes, _NO_ACCESS, _RESERVED_ONLY, -1, 0)
        reserved = VirtualRange(address, nbytes)
        self._book.reserved(reserved)
        return reserved

    def create(self, nbytes: int) -> PhysicalHandle:
        self._book.check_size("create", nbytes)
        left_bytes = available_bytes()
        if nbytes > left_bytes:
            raise VmmError("create", f"{nbytes} bytes", f"only {left_bytes} bytes are available")
        if self._fd < 0:
            self._fd = os.memfd_create("dps", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._fd, self._end, nbytes)
        except OSError as error:
            self._punch(self._end, nbytes)
            self._close_if_unused()
            raise VmmError("create", f"{nbytes} bytes", str(error)) from None
        handle = PhysicalHandle(next(self._ids), nbytes)
        self._offsets[handle] = self._end
        self._end += nbytes
        self._book.created(handle)
        return handle

    def map(self, address: int, handle: PhysicalHandle) -> None:
        self._book.check_map(address, handle)
        _mmap("map", address, handle.nbytes, mmap.PROT_READ | mmap.PROT_WRITE,
              mmap.MAP_SHARED | _MAP_FIXED, self._fd, self._offsets[handle])  # fmt: skip
        self._book.mapped(address, handle)

    def unmap(self, address: int, nbytes: int) -> None:
        self._book.check_unmap(address, nbytes)
        _mmap("unmap", address, nbytes, _NO_ACCESS, _RESERVED_ONLY | _MAP_FIXED, -1, 0)
        self._book.unmapped(address)

    def release(self, handle: PhysicalHandle) -> None:
        self._book.check_release(handle)
        self._punch(self._offsets.pop(handle), handle.nbytes)
        self._book.released(handle)
        self._close_if_unused()

    def free(self, reserved: VirtualRange) -> None:
        self._book.check_free(reserved)
        if _libc.munmap(reserved.address, reserved.nbytes):
            sizes = f"{reserved.nbytes} bytes at {reserved.address:#x}"
            raise VmmError("free", sizes, os.strerror(ctypes.get_errno()))
        self._book.freed(reserved)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def near(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pin(self, host: torch.Tensor) -> None:
        return

    def unpin(self, host: torch.Tensor) -> None:
        return

    def close(self) -> None:
        if not self._book.empty:
            raise VmmError("close", f"{self.created_bytes} bytes", "still reserved or created")

    def _punch(self, offset: int, nbytes: int) -> None:
        mode = _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE
        if _libc.fallocate(self._fd, mode, offset, nbytes):
            raise VmmError("release", f"{nbytes} bytes", os.strerror(ctypes.get_errno()))

    def _close_if_unused(self) -> None:
        if not self._offsets:
            os.close(self._fd)
            self._fd, self._end = -1, 0


def _mmap(
    call: str, address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int
) -> int:
    result = _libc.mmap(address or None, nbytes, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise VmmError(call, f"{nbytes} bytes at {address:#x}", reason)
    return int(result)
