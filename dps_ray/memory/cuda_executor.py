"""Ordered memory operations on a CUDA stream."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dps_ray.memory.cuda_calls import CudaCalls, TorchSide
from dps_ray.memory.device_checksum import DeviceChecksum
from dps_ray.memory.driver import Fence


class EventPool:
    """CUDA events for marks, used again once nobody holds the mark.

    Recording an event anew does not disturb a stream that already waits for its earlier record:
    ``cuStreamWaitEvent`` captures what it waits for when it is called.
    """

    def __init__(self, calls: CudaCalls) -> None:
        self._calls = calls
        self._idle: deque[Any] = deque()
        self._all: list[Any] = []

    def record(self, stream: int) -> "CudaMark":
        """Mark the end of all work given to ``stream`` so far."""
        try:
            event = self._idle.popleft()
        except IndexError:
            flags = self._calls.bindings.CUevent_flags
            event = self._calls(
                "cuEventCreate",
                "no timing",
                flags.CU_EVENT_DISABLE_TIMING.value | flags.CU_EVENT_BLOCKING_SYNC.value,
            )
            self._all.append(event)
        mark = CudaMark(self._calls, event, self._idle)
        self._calls("cuEventRecord", f"stream {stream:#x}", event, stream)
        return mark

    def close(self) -> None:
        """Destroy every event; no mark may be used any more."""
        self._idle.clear()
        while self._all:
            self._calls("cuEventDestroy", "", self._all.pop())


class CudaMark:
    """A fence: a recorded event, which goes back to its pool with the last reference."""

    def __init__(self, calls: CudaCalls, event: Any, home: deque[Any]) -> None:
        self._calls = calls
        self.event = event
        self._home = home

    def wait(self) -> None:
        self._calls("cuEventSynchronize", "", self.event)

    def __del__(self) -> None:
        self._home.append(self.event)


class CudaExecutor:
    """Every operation is queued on a stream and returns at once, except ``checksum``.

    Parameters
    ----------
    calls, torch_side, events
        The driver's own.
    stream
        Gives the stream's handle whenever an operation is queued.
    drain
        Name of the call that waits for all work of this executor, and its arguments.
    """

    depth = 2

    def __init__(
        self,
        calls: CudaCalls,
        torch_side: TorchSide,
        events: EventPool,
        stream: Callable[[], int],
        *drain: Any,
    ) -> None:
        self._calls = calls
        self._torch = torch_side
        self._events = events
        self._stream = stream
        self._drain = drain
        self._checksum: DeviceChecksum | None = None

    def zero(self, tensor: torch.Tensor) -> None:
        nbytes, address = tensor.numel(), tensor.data_ptr()
        sizes = f"{nbytes} bytes at {address:#x}"
        self._calls("cuMemsetD8Async", sizes, address, 0, nbytes, self._stream())

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if destination.numel() != source.numel():
            raise ValueError(f"copy of {source.numel()} bytes into {destination.numel()}")
        nbytes, target, origin = source.numel(), destination.data_ptr(), source.data_ptr()
        sizes = f"{nbytes} bytes from {origin:#x} to {target:#x}"
        self._calls("cuMemcpyAsync", sizes, target, origin, nbytes, self._stream())

    def copy_summed(
        self, destination: torch.Tensor, source: torch.Tensor, first_row: int
    ) -> int | None:
        self.copy(destination, source)
        return None

    def checksum(self, tensor: torch.Tensor) -> int:
        with self._torch.on(self._stream()):
            if self._checksum is None:
                self._checksum = DeviceChecksum(self._torch.device)
            return self._checksum(tensor)

    def mark(self) -> Fence:
        return self._events.record(self._stream())

    def wait_for(self, fence: Fence) -> None:
        if isinstance(fence, CudaMark):
            stream = self._stream()
            self._calls("cuStreamWaitEvent", f"stream {stream:#x}", stream, fence.event, 0)
        else:
            fence.wait()

    def synchronize(self) -> None:
        name, *arguments = self._drain
        self._calls(name, "", *arguments)
