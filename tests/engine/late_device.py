"""A rank whose device runs behind the host, as a GPU does under asynchronous scheduling.

The rank, its shared region, backup and restore worker are real, on host memory. The compute
executor is a thread that works through steps, zeroing and marks in the order they were given, each
step some time after it was launched: what a stream is to the host.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue

import torch

from dps_ray.memory.driver import Executor, Fence
from dps_ray.memory.host_driver import HostDriver, HostExecutor

STEP_S = 0.004


@dataclass(frozen=True)
class Reached:
    """A point in the stream."""

    event: threading.Event

    def wait(self) -> None:
        assert self.event.wait(30.0), "the device stands still"


class LateStream(HostExecutor):
    """An ordered queue of work on a thread of its own."""

    def __init__(self) -> None:
        self._work: Queue[tuple[Callable[[], None], threading.Event] | None] = Queue()
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], None]) -> Reached:
        """Queue ``work``; the point after it."""
        event = threading.Event()
        self._work.put((work, event))
        return Reached(event)

    def mark(self) -> Fence:
        return self.launch(lambda: None)

    def wait_for(self, fence: Fence) -> None:
        self.launch(fence.wait)

    def zero(self, tensor: torch.Tensor) -> None:
        self.launch(lambda: HostExecutor.zero(self, tensor))

    def synchronize(self) -> None:
        self.mark().wait()

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join(30.0)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, event = item
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            event.set()


class LateDriver(HostDriver):
    """Host memory, a late compute stream, copies that run beside it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = LateStream()

    @property
    def compute(self) -> Executor:
        return self.stream


def slow(work: Callable[[], None]) -> Callable[[], None]:
    """A step: it takes its time before it touches memory."""

    def run() -> None:
        time.sleep(STEP_S)
        work()

    return run
