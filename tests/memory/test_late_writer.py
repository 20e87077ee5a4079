"""Steps that are late: what the fence and the held-back compute stream are for, one case each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from dps_ray.commands import RestoreTask, StepCommand
from dps_ray.memory.driver import Fence
from dps_ray.memory.manager import MemoryManager
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.restore_result import RestoreResult
from dps_ray.modes import Mode

from .step_engines import TIMEOUT_S, CudaSteps, HostSteps

if TYPE_CHECKING:
    from conftest import Rig

UNIT = 1
PATIENCE_S = 0.05
"""A restore that ignores its fence has this long to show it."""


class Nothing:
    """What a fence is when it is removed."""

    def wait(self) -> None:
        return


class Played:
    """A rank whose unit is lent, and the results of its restores."""

    def __init__(self, build: Callable[..., Rig], engine: HostSteps | CudaSteps) -> None:
        self.engine = engine
        self.rig = build(driver=engine.driver)
        self.rig.region.upload_all()
        self.results: list[RestoreResult] = []
        self.manager = MemoryManager(
            self.rig.region,
            pacer=Pacer(max_inflation=0.05, floor_bytes_per_s=1e9),
            chunk_bytes=4096,
            verify=True,
            on_done=self.results.append,
        )
        self.manager.apply(StepCommand(Mode.FAST, zero=(UNIT,)), Nothing())

    def write_kv(self) -> None:
        self.rig.region.unit_kv_view(UNIT).fill_(0xEE)

    def restore(self, fence: Fence) -> RestoreTask:
        task = RestoreTask(UNIT, UNIT, len(self.results) + 1)
        self.manager.apply(StepCommand(Mode.FAST, restore=(task,)), fence)
        return task

    def intact(self) -> bool:
        region = self.rig.region
        region.driver.compute.synchronize()
        return torch.equal(region.segment_view(UNIT), region.backup.segment(UNIT))

    def close(self) -> None:
        self.manager.close()
        self.engine.close()


@pytest.fixture(params=[HostSteps, CudaSteps], ids=["host", "cuda"])
def played(request: pytest.FixtureRequest, builder: Callable[..., Rig]) -> Iterator[Played]:
    played = Played(builder, request.param())
    yield played
    played.close()


def test_behind_the_fence_a_late_kv_write_is_overwritten(played: Played) -> None:
    step = played.engine.queue_step(played.write_kv)
    played.restore(step.fence)
    played.manager.wait_idle(PATIENCE_S)
    step.run()
    assert played.manager.wait_idle(TIMEOUT_S)
    step.fence.wait()
    assert [result.ok for result in played.results] == [True]
    assert played.intact()


def test_without_the_fence_a_late_kv_write_corrupts_a_residual_that_was_verified(
    played: Played,
) -> None:
    step = played.engine.queue_step(played.write_kv)
    played.restore(Nothing())
    assert played.manager.wait_idle(TIMEOUT_S)
    assert [result.ok for result in played.results] == [True]
    step.run()
    step.fence.wait()
    assert not played.intact()


def test_on_cuda_the_late_kernel_runs_before_the_first_chunk(builder: Callable[..., Rig]) -> None:
    engine = CudaSteps()
    played = Played(builder, engine)
    step = engine.queue_step(played.write_kv)
    before = len(engine.fake.streams.order)
    played.restore(step.fence)
    assert played.manager.wait_idle(TIMEOUT_S)
    order = engine.fake.streams.order[before:]
    assert order.index("kernel") < order.index("copy")
    assert "cuStreamWaitEvent" in engine.fake.names()
    played.close()


def test_on_cuda_a_steal_holds_back_the_compute_stream_and_not_the_scheduler(
    builder: Callable[..., Rig],
) -> None:
    engine = CudaSteps()
    played = Played(builder, engine)
    played.rig.region.driver.compute.synchronize()
    fake, before = engine.fake, len(engine.fake.streams.order)
    fake.host_may_wait.clear()
    copied_before = fake.names().count("cuMemcpyAsync")
    task = played.restore(engine.driver.compute.mark())
    deadline_s = time.monotonic() + TIMEOUT_S
    while fake.names().count("cuMemcpyAsync") == copied_before and time.monotonic() < deadline_s:
        time.sleep(0.001)
    played.manager.apply(StepCommand(Mode.FAST, cancel=(task,), zero=(UNIT,)), Nothing())
    engine.launch(played.write_kv)
    assert "copy" not in fake.streams.order[before:], "the scheduler waited for the copy"
    fake.host_may_wait.set()
    played.rig.region.driver.compute.synchronize()
    order = [name for name in fake.streams.order[before:] if name not in ("record", "wait")]
    copies = order.count("copy")
    assert copies >= 1
    assert order == ["copy"] * copies + ["zero", "kernel"]
    assert bool((played.rig.region.unit_kv_view(UNIT) == 0xEE).all())
    assert played.manager.wait_idle(TIMEOUT_S)
    assert played.results == []
    played.close()
