"""Virtual-memory driver on a CUDA device, through the driver API.

One process drives one device, and no rank maps another's memory: nothing is exported, and access
is given to the device alone. Every handle is mapped whole, at offset 0, as ``cuMemMap`` asks.
"""

import logging
import resource
from contextlib import AbstractContextManager
from typing import Any

import torch

from dps_ray.memory.cuda_calls import CudaCalls, TorchCuda, TorchSide, cuda_bindings
from dps_ray.memory.cuda_executor import CudaExecutor, EventPool
from dps_ray.memory.dlpack import tensor_at
from dps_ray.memory.driver import Executor, PhysicalHandle, VirtualRange, VmmError
from dps_ray.memory.host_memory import available_bytes
from dps_ray.memory.mappings import Mappings
from dps_ray.memory.numa import cpus_near, running_on

logger = logging.getLogger("vllm.dps")

_PCI_BUS_ID_BYTES = 16


class CudaDriver:
    """``VmmDriver`` over ``cuMemCreate`` and ``cuMemMap``. See the protocol for each method.

    ``compute`` is the stream that the calling thread launches its kernels on, ``transfer`` a
    stream of the lowest priority. Calls may come from any thread, one at a time.

    Parameters
    ----------
    ordinal
        CUDA ordinal of the device.
    bindings
        ``cuda.bindings.driver``; tests give one that records.
    torch_side
        Torch on that device.

    Raises
    ------
    DpsConfigError
        When cuda-python is not installed.
    VmmError
        When a driver call is refused; everything done so far is undone.
    """

    def __init__(
        self, ordinal: int, *, bindings: Any = None, torch_side: TorchSide | None = None
    ) -> None:
        api = cuda_bindings() if bindings is None else bindings
        self._api = api
        self._ordinal = ordinal
        self._torch = TorchCuda(ordinal) if torch_side is None else torch_side
        self._calls = CudaCalls(api, ordinal)
        self._pinned: dict[int, int] = {}
        self._views: dict[int, torch.Tensor] = {}
        self._stream: Any = None
        self._closed = False
        try:
            self._open()
        except VmmError:
            self.close()
            raise

    def _open(self) -> None:
        api, calls = self._api, self._calls
        device = f"device {self._ordinal}"
        self._placement = api.CUmemLocation()
        self._placement.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._placement.id = self._ordinal
        self._properties = api.CUmemAllocationProp()
        self._properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = self._placement
        self._access = api.CUmemAccessDesc()
        self._access.location = self._placement
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        smallest = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity_bytes = int(
            calls("cuMemGetAllocationGranularity", device, self._properties, smallest)
        )
        self._book = Mappings(self._granularity_bytes)
        lowest_priority, _ = calls("cuCtxGetStreamPriorityRange", device)
        flags = api.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        self._stream = calls("cuStreamCreateWithPriority", device, flags, lowest_priority)
        transfer = int(self._stream)
        self._events = EventPool(calls)
        self._transfer = CudaExecutor(
            calls, self._torch, self._events, lambda: transfer, "cuStreamSynchronize", transfer
        )
        # Kernels may run on streams that nobody named here: wait for the whole device.
        self._compute = CudaExecutor(
            calls, self._torch, self._events, self._torch.current_stream, "cuCtxSynchronize"
        )
        bus_id = calls("cuDeviceGetPCIBusId", device, _PCI_BUS_ID_BYTES, calls.device)
        self._near_cpus = cpus_near(bus_id.split(b"\0")[0].decode())

    @property
    def granularity_bytes(self) -> int:
        return self._granularity_bytes

    @property
    def compute(self) -> Executor:
        return self._compute

    @property
    def transfer(self) -> Executor:
        return self._transfer

    @property
    def between_steps(self) -> Executor | None:
        return None

    @property
    def created_bytes(self) -> int:
        """Physical memory held by this driver's handles, bytes."""
        return self._book.created_bytes

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Memory of the device that is free, and all of it (``cuMemGetInfo``)."""
        return self._calls.free_and_total_bytes()

    def reserve(self, nbytes: int) -> VirtualRange:
        self._book.check_size("reserve", nbytes)
        sizes = f"{nbytes} bytes"
        pointer = self._calls("cuMemAddressReserve", sizes, nbytes, self._granularity_bytes, 0, 0)
        reserved = VirtualRange(int(pointer), nbytes)
        # One view of the whole range: every other is a slice of it.
        self._views[reserved.address] = tensor_at(
            reserved.address, nbytes, self._torch.device_type, self._ordinal
        )
        self._book.reserved(reserved)
        return reserved

    def create(self, nbytes: int) -> PhysicalHandle:
        self._book.check_size("create", nbytes)
        try:
            value = self._calls("cuMemCreate", f"{nbytes} bytes", nbytes, self._properties, 0)
        except VmmError as error:
            free_bytes, total_bytes = self.free_and_total_bytes()
            reason = f"{error.reason} ({free_bytes} of {total_bytes} bytes are free)"
            raise VmmError(error.call, f"{nbytes} bytes", reason) from None
        handle = PhysicalHandle(int(value), nbytes)
        self._book.created(handle)
        return handle

    def map(self, address: int, handle: PhysicalHandle) -> None:
        self._book.check_map(address, handle)
        nbytes, sizes = handle.nbytes, f"{handle.nbytes} bytes at {address:#x}"
        self._calls("cuMemMap", sizes, address, nbytes, 0, handle.value, 0)
        try:
            self._calls("cuMemSetAccess", sizes, address, nbytes, [self._access], 1)
        except VmmError:
            self._calls("cuMemUnmap", sizes, address, nbytes)
            raise
        self._book.mapped(address, handle)

    def unmap(self, address: int, nbytes: int) -> None:
        self._book.check_unmap(address, nbytes)
        self._calls("cuMemUnmap", f"{nbytes} bytes at {address:#x}", address, nbytes)
        self._book.unmapped(address)

    def release(self, handle: PhysicalHandle) -> None:
        self._book.check_release(handle)
        self._calls("cuMemRelease", f"{handle.nbytes} bytes", handle.value)
        self._book.released(handle)

    def free(self, reserved: VirtualRange) -> None:
        self._book.check_free(reserved)
        address, nbytes = reserved.address, reserved.nbytes
        self._calls("cuMemAddressFree", f"{nbytes} bytes at {address:#x}", address, nbytes)
        self._book.freed(reserved)
        del self._views[address]

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        reserved = self._book.range_of(address, nbytes)
        if reserved is None:
            raise VmmError("tensor", f"{nbytes} bytes at {address:#x}", "not reserved")
        offset = address - reserved.address
        return self._views[reserved.address][offset : offset + nbytes]

    def near(self) -> AbstractContextManager[None]:
        return running_on(self._near_cpus)

    def pin(self, host: torch.Tensor) -> None:
        address, nbytes = host.data_ptr(), host.numel()
        try:
            self._calls("cuMemHostRegister", f"{nbytes} bytes", address, nbytes, 0)
        except VmmError as error:
            raise VmmError(error.call, f"{nbytes} bytes", f"{error.reason} ({_limits()})") from None
        self._pinned[address] = nbytes

    def unpin(self, host: torch.Tensor) -> None:
        nbytes = self._pinned.pop(host.data_ptr())
        self._calls("cuMemHostUnregister", f"{nbytes} bytes", host.data_ptr())

    def close(self) -> None:
        if self._closed:
            return
        if self._stream is not None:
            if not self._book.empty or self._pinned:
                raise VmmError(
                    "close", f"{self.created_bytes} bytes", "still reserved, created or pinned"
                )
            self._events.close()
            self._calls("cuStreamDestroy", "", self._stream)
        self._calls.close()
        self._closed = True


def _limits() -> str:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked} bytes"
    return f"{available_bytes()} bytes of host memory are free, locked memory (ulimit -l): {limit}"
