"""``cuda.bindings.driver`` on host memory, whose streams run as late as they can.

Structures and enumerations are the real module's. Memory is a memfd behind ``HostDriver``, so two
mappings of one handle show the same bytes.
"""

# ruff: noqa: N802 (the names are CUDA's)

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cuda.bindings.driver as real
import torch

from dps_ray.memory.dlpack import DLDeviceType
from dps_ray.memory.driver import PhysicalHandle, VirtualRange
from dps_ray.memory.host_driver import HostDriver

from .fake_streams import FakeStreams
from .recorded_calls import RecordedCalls

COMPUTE_STREAM = 0x10


class FakeCuda(RecordedCalls):
    """The part of the driver API that the CUDA driver uses."""

    def __init__(self, *, granularity_bytes: int = 4096, device_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.granularity_bytes = granularity_bytes
        self.device_bytes = device_bytes
        self.damage_next_copy = False
        self.host_may_wait = threading.Event()
        """While clear, a thread that waits for an event stays there: nothing it waits for runs."""
        self.host_may_wait.set()
        self.pageable_copies = 0
        """Copies whose host side was not pinned."""
        self.streams = FakeStreams()
        self.streams.create(COMPUTE_STREAM)
        self._memory = HostDriver()
        self._handles: dict[int, PhysicalHandle] = {}
        self._ranges: dict[int, VirtualRange] = {}
        self._accessible: dict[int, int] = {}
        self._pinned: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    # --- for tests -----------------------------------------------------------------------------

    def launch(self, kernel: Callable[[], object], name: str = "kernel") -> None:
        """Queue a kernel on the stream torch computes on."""
        with self.lock:
            self.streams.enqueue(COMPUTE_STREAM, name, kernel)

    # --- device and context --------------------------------------------------------------------

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self.call("cuInit", flags)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return self.call("cuDeviceGet", ordinal, result=lambda: ordinal)

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        return self.call("cuDeviceGetAttribute", attribute, device, result=lambda: 1)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self.take("cuDevicePrimaryCtxRetain", "context", device)

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        return self.drop("cuDevicePrimaryCtxRelease", "context", next(iter(self.live["context"])))

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        return self.call("cuCtxSetCurrent", context)

    def cuCtxGetStreamPriorityRange(self) -> tuple[Any, ...]:
        status, _ = self.call("cuCtxGetStreamPriorityRange", result=lambda: None)
        return status, 0, -5

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, ...]:
        return self.call("cuDeviceGetPCIBusId", length, result=lambda: b"0000:1B:00.0\0\0\0\0")

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        status, _ = self.call("cuMemGetInfo", result=lambda: None)
        return status, self.device_bytes - self._memory.created_bytes, self.device_bytes

    # --- memory --------------------------------------------------------------------------------

    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> tuple[Any, ...]:
        self._check_placement(prop.location)
        return self.call(
            "cuMemGetAllocationGranularity", option, result=lambda: self.granularity_bytes
        )

    def cuMemAddressReserve(
        self, nbytes: int, alignment: int, address: int, flags: int
    ) -> tuple[Any, ...]:
        def reserve() -> Any:
            reserved = self._memory.reserve(nbytes)
            self._ranges[reserved.address] = reserved
            self.live["range"].add(reserved.address)
            return real.CUdeviceptr(reserved.address)

        return self.call("cuMemAddressReserve", nbytes, alignment, result=reserve)

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        def free() -> None:
            assert self._ranges[address].nbytes == nbytes
            self._memory.free(self._ranges.pop(address))
            self.live["range"].remove(address)

        return self.call("cuMemAddressFree", address, nbytes, effect=free)

    def cuMemCreate(self, nbytes: int, prop: Any, flags: int) -> tuple[Any, ...]:
        self._check_placement(prop.location)
        if nbytes > self.device_bytes - self._memory.created_bytes:
            self.refuse("cuMemCreate", status="CUDA_ERROR_OUT_OF_MEMORY")

        def create() -> Any:
            value = next(self.ids)
            self._handles[value] = self._memory.create(nbytes)
            self.live["handle"].add(value)
            return real.CUmemGenericAllocationHandle(value)

        return self.call("cuMemCreate", nbytes, result=create)

    def cuMemRelease(self, value: int) -> tuple[Any, ...]:
        def release() -> None:
            self._memory.release(self._handles.pop(value))
            self.live["handle"].remove(value)

        return self.call("cuMemRelease", value, effect=release)

    def cuMemMap(
        self, address: int, nbytes: int, offset: int, value: int, flags: int
    ) -> tuple[Any, ...]:
        def map_handle() -> None:
            assert offset == 0
            assert self._handles[value].nbytes == nbytes, "a mapping takes the whole handle"
            self._memory.map(address, self._handles[value])
            self.live["mapping"].add(address)

        return self.call("cuMemMap", address, nbytes, offset, value, effect=map_handle)

    def cuMemSetAccess(
        self, address: int, nbytes: int, access: list[Any], count: int
    ) -> tuple[Any, ...]:
        def set_access() -> None:
            assert len(access) == count == 1
            self._check_placement(access[0].location)
            assert access[0].flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._accessible[address] = nbytes

        return self.call("cuMemSetAccess", address, nbytes, effect=set_access)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        def unmap() -> None:
            self._memory.unmap(address, nbytes)
            self._accessible.pop(address, None)
            self.live["mapping"].remove(address)

        return self.call("cuMemUnmap", address, nbytes, effect=unmap)

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        def register() -> None:
            self._pinned[address] = nbytes
            self.live["pinned"].add(address)

        return self.call("cuMemHostRegister", address, nbytes, flags, effect=register)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        def unregister() -> None:
            del self._pinned[address]
            self.live["pinned"].remove(address)

        return self.call("cuMemHostUnregister", address, effect=unregister)

    # --- streams and events --------------------------------------------------------------------

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, ...]:
        def create() -> Any:
            stream = next(self.ids)
            self.streams.create(stream)
            self.live["stream"].add(stream)
            return real.CUstream(stream)

        return self.call("cuStreamCreateWithPriority", flags, priority, result=create)

    def cuStreamDestroy(self, stream: Any) -> tuple[Any, ...]:
        return self.drop("cuStreamDestroy", "stream", int(stream))

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return self.call("cuStreamSynchronize", stream, effect=lambda: self.streams.drain(stream))

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return self.call("cuCtxSynchronize", effect=self.streams.drain_all)

    def cuStreamWaitEvent(self, stream: int, event: Any, flags: int) -> tuple[Any, ...]:
        return self.call(
            "cuStreamWaitEvent", stream, event,
            effect=lambda: self.streams.wait(stream, int(event)),
        )  # fmt: skip

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return self.take("cuEventCreate", "event", flags, make=real.CUevent)

    def cuEventDestroy(self, event: Any) -> tuple[Any, ...]:
        return self.drop("cuEventDestroy", "event", int(event))

    def cuEventRecord(self, event: Any, stream: int) -> tuple[Any, ...]:
        def record() -> None:
            assert int(event) in self.live["event"]
            self.streams.record(stream, int(event))

        return self.call("cuEventRecord", event, stream, effect=record)

    def cuEventSynchronize(self, event: Any) -> tuple[Any, ...]:
        assert self.host_may_wait.wait(20.0)
        return self.call("cuEventSynchronize", event, effect=lambda: self.streams.reach(int(event)))

    def cuMemcpyAsync(
        self, destination: int, source: int, nbytes: int, stream: int
    ) -> tuple[Any, ...]:
        def copy() -> None:
            self._check_access(destination, nbytes)
            ctypes.memmove(destination, source, nbytes)
            if self.damage_next_copy:
                self.damage_next_copy = False
                (ctypes.c_uint8 * nbytes).from_address(destination)[nbytes - 1] ^= 0x10

        def queue() -> None:
            if not any(
                start <= source and source + nbytes <= start + length
                for start, length in self._pinned.items()
            ):
                self.pageable_copies += 1
            self.streams.enqueue(stream, "copy", copy)

        return self.call("cuMemcpyAsync", destination, source, nbytes, stream, effect=queue)

    def cuMemsetD8Async(
        self, address: int, value: int, nbytes: int, stream: int
    ) -> tuple[Any, ...]:
        def fill() -> None:
            self._check_access(address, nbytes)
            ctypes.memset(address, value, nbytes)

        return self.call(
            "cuMemsetD8Async", address, value, nbytes, stream,
            effect=lambda: self.streams.enqueue(stream, "zero", fill),
        )  # fmt: skip

    # --- internals -----------------------------------------------------------------------------

    def _check_placement(self, location: Any) -> None:
        assert location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        assert location.id == 0

    def _check_access(self, address: int, nbytes: int) -> None:
        """Every byte must lie in mappings that access was set for."""
        end = address + nbytes
        while address < end:
            covering = [s for s, n in self._accessible.items() if s <= address < s + n]
            assert covering, f"no access to {address:#x}: an illegal address on a real device"
            address = covering[0] + self._accessible[covering[0]]


class FakeTorch:
    """Torch's side of the fake: host tensors, and one stream that kernels are launched on."""

    device_type = DLDeviceType.CPU
    device = torch.device("cpu")

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    def current_stream(self) -> int:
        return COMPUTE_STREAM

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        # Host tensors are computed on at once, as if the stream had been drained.
        self._fake.streams.drain(stream)
        yield
