"""Steps of an engine beside one rank's memory: on a host, and on recorded CUDA streams.

A test plays the scheduler with them: it launches kernels that read and write KV blocks, and has
steps that are still queued when a command comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from dps_ray.memory.cuda_driver import CudaDriver
from dps_ray.memory.driver import Executor, Fence
from dps_ray.memory.host_driver import HostDriver, HostExecutor

from .fake_cuda import FakeCuda, FakeTorch

TIMEOUT_S = 20.0


class QueuedStep(Protocol):
    """A step scheduled earlier that has not run."""

    fence: Fence
    """Reached once the step has run."""

    def run(self) -> None:
        """Let it run."""


class StepEngine(Protocol):
    """Where the steps of a test run."""

    driver: HostDriver | CudaDriver

    def launch(self, kernel: Callable[[], None]) -> None:
        """Give the compute executor a kernel."""

    def queue_step(self, kernel: Callable[[], None]) -> QueuedStep:
        """Schedule a step whose kernel has not run when this returns."""

    def chunks_stay_in_flight(self) -> AbstractContextManager[None]:
        """Meanwhile no chunk lands because the restore thread waits for it."""

    def damage_next_copy(self) -> None:
        """Let the link flip a bit of the next chunk."""

    def mend(self) -> None:
        """Let the link be sound again."""

    def close(self) -> None:
        """Close the driver; nothing may be left."""


class DamagingExecutor(HostExecutor):
    """Copies, then flips a bit when told to: a broken link."""

    damage_next = False

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(destination, source)
        if self.damage_next:
            self.damage_next = False
            destination[-1] ^= 0x10


class DamagingDriver(HostDriver):
    def __init__(self) -> None:
        super().__init__()
        self.link = DamagingExecutor()

    @property
    def transfer(self) -> Executor:
        return self.link

    @property
    def between_steps(self) -> Executor | None:
        return self.link


class _Gate:
    def __init__(self) -> None:
        self.reached = threading.Event()

    def wait(self) -> None:
        assert self.reached.wait(TIMEOUT_S)


class _HostStep:
    """A kernel that the calling thread runs when it is told to."""

    def __init__(self, kernel: Callable[[], None]) -> None:
        self.fence = _Gate()
        self._kernel = kernel

    def run(self) -> None:
        self._kernel()
        self.fence.reached.set()


class HostSteps:
    """Kernels run at once; a queued step is one that some other thread is late with."""

    def __init__(self) -> None:
        self.driver = DamagingDriver()

    def launch(self, kernel: Callable[[], None]) -> None:
        kernel()

    def queue_step(self, kernel: Callable[[], None]) -> QueuedStep:
        return _HostStep(kernel)

    def chunks_stay_in_flight(self) -> AbstractContextManager[None]:
        return nullcontext()  # A chunk has landed when its copy returns.

    def damage_next_copy(self) -> None:
        self.driver.link.damage_next = True

    def mend(self) -> None:
        self.driver.link.damage_next = False

    def close(self) -> None:
        self.driver.close()


class _CudaStep:
    """A kernel on the compute stream, which runs it no sooner than somebody waits for it."""

    def __init__(self, fence: Fence) -> None:
        self.fence = fence

    def run(self) -> None:
        return


class CudaSteps:
    """Kernels are queued on the compute stream, which runs as late as it can."""

    def __init__(self) -> None:
        self.fake = FakeCuda()
        self.driver = CudaDriver(0, bindings=self.fake, torch_side=FakeTorch(self.fake))

    def launch(self, kernel: Callable[[], None]) -> None:
        self.fake.launch(kernel)

    def queue_step(self, kernel: Callable[[], None]) -> QueuedStep:
        self.fake.launch(kernel)
        return _CudaStep(self.driver.compute.mark())

    @contextmanager
    def chunks_stay_in_flight(self) -> Iterator[None]:
        self.fake.host_may_wait.clear()
        try:
            yield
        finally:
            self.fake.host_may_wait.set()

    def damage_next_copy(self) -> None:
        self.fake.damage_next_copy = True

    def mend(self) -> None:
        self.fake.damage_next_copy = False

    def close(self) -> None:
        self.driver.close()
        assert not self.fake.leaks
