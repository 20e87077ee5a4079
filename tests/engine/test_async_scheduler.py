"""vLLM's asynchronous scheduler made elastic: step k+1 is scheduled before step k has run.

Scheduler, block pool, SUM manager, rank and memory are real; the model is a writer of known bytes
on a device that runs behind the host (``late_device``). Its outputs are made by hand.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from dps_ray.engine import rank as ranks
from dps_ray.memory.host_driver import HostExecutor
from dps_ray.modes import Floor, Mode

from .async_engine import BLOCK_TOKENS, DEPTH, AsyncEngine
from .late_device import STEP_S, LateDriver, LateStream
from .test_configure import engine_args

WAVES = 8
ATTEMPTS = 10
WATERMARK = 0.2
"""Share of the blocks that admissions leave free; of so few, a usual 5% would be one."""


@pytest.fixture
def config(tiny: Any) -> VllmConfig:
    config = engine_args(
        tiny("qwen3"), max_num_seqs=8, enable_prefix_caching=False
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    init_none_hash(sha256)
    return config


@pytest.fixture
def engine(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncEngine]:
    driver = LateDriver()
    monkeypatch.setattr(ranks, "open_driver", lambda kind, ordinal: driver)
    engine = AsyncEngine(config, driver, seed=0)
    yield engine
    engine.close()


def serve_bursts(engine: AsyncEngine) -> None:
    """Bursts that lend, requests that stop or are aborted while a later step of theirs runs."""
    for _ in range(WAVES):
        names = [
            engine.add(engine.rng.randint(20, 90), engine.rng.randint(2, 40)) for _ in range(6)
        ]
        for _ in range(engine.rng.randint(10, 60)):
            engine.turn()
        engine.scheduler.finish_requests(
            engine.rng.sample(names, 2), RequestStatus.FINISHED_ABORTED
        )
        for _ in range(engine.rng.randint(0, 30)):
            engine.turn()
    engine.run_dry()


def serve_bursts_with_late_writes(engine: AsyncEngine) -> None:
    """Bursts, until a step in flight wrote to a unit that a restore was ordered for.

    On a busy machine each such step may happen to end before the order.
    """
    for _ in range(ATTEMPTS):
        serve_bursts(engine)
        if engine.late_writes:
            return
    raise AssertionError("no step in flight wrote to a unit that a restore was ordered for")


def test_asynchronous_bursts_leave_weights_and_modes_right(engine: AsyncEngine) -> None:
    serve_bursts_with_late_writes(engine)
    counters = engine.scheduler.sum_manager.counters
    assert engine.modes == {Mode.FULL, Mode.FAST}
    assert counters.units_lent > WAVES
    assert engine.full_steps_on_wrong_weights == 0
    assert counters.restores_failed == 0
    assert engine.scheduler.mode is Mode.FULL
    assert engine.rank.verify()["residual_intact"]
    assert not engine.stream.errors


def test_watermark_of_the_scheduler_composes_with_lending(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admissions keep blocks free for growth, among them those that a lend would give."""
    preempted = {}
    for watermark in (0.0, WATERMARK):
        config.scheduler_config.watermark = watermark
        driver = LateDriver()
        monkeypatch.setattr(ranks, "open_driver", lambda kind, ordinal, driver=driver: driver)
        with closing(AsyncEngine(config, driver, seed=0)) as engine:
            never_stopping = iter(float(n) for n in range(1, 100_000)).__next__
            monkeypatch.setattr(engine.rng, "random", never_stopping)
            for _ in range(3):
                names = [engine.add(80, 60) for _ in range(8)]
                engine.run_dry()
                assert set(names) <= engine.ends.keys()
            counters = engine.scheduler.sum_manager.counters
            assert counters.units_lent > 0
            assert (engine.full_steps_on_wrong_weights, counters.restores_failed) == (0, 0)
            assert engine.scheduler.mode is Mode.FULL
            preempted[watermark] = engine.scheduler._publisher.preemptions
    assert preempted[0.0] > 0, "the load preempts nobody"
    assert preempted[WATERMARK] < preempted[0.0]


def test_without_the_step_fence_a_late_writer_ruins_the_residual(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = LateStream().mark()
    monkeypatch.setattr(LateStream, "mark", lambda self: reached)
    monkeypatch.setattr(engine.stream, "synchronize", lambda: engine.stream.launch(int).wait())
    counters = engine.scheduler.sum_manager.counters
    # On a busy machine a copy may happen to come after every late write of some bursts.
    for _ in range(ATTEMPTS):
        serve_bursts_with_late_writes(engine)
        ruined = not engine.rank.verify()["residual_intact"]
        if engine.full_steps_on_wrong_weights or counters.restores_failed or ruined:
            return
    raise AssertionError("no late write ruined anything")


def test_restores_that_the_fleet_stops_leave_weights_right(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = HostExecutor.copy_summed

    def slowly(*arguments: Any) -> int | None:
        time.sleep(2 * STEP_S)
        return copy(*arguments)

    monkeypatch.setattr(HostExecutor, "copy_summed", slowly)
    page, ledger = engine.scheduler._page, engine.scheduler.sum_manager.ledger
    counters = engine.scheduler.sum_manager.counters
    stopped = 0
    for wave in range(ATTEMPTS * WAVES):
        # On a busy machine a restore may end between this thread's look at it and the stop.
        if wave >= WAVES and stopped > WAVES and counters.restores_cancelled:
            break
        for _ in range(6):
            engine.add(engine.rng.randint(20, 90), engine.rng.randint(2, 20))
        while engine.flights or engine.scheduler.has_requests():
            schedules = engine.scheduler.has_requests() and len(engine.flights) < DEPTH
            stop = schedules and len(ledger.open_restores) > 0 and engine.rng.random() < 0.4
            stopped += len(ledger.open_restores) if stop else 0
            page.set_permits(restore_until_s=None, fast=True, stop_restores=stop)
            engine.turn()
    assert stopped > WAVES
    assert counters.restores_cancelled > 0
    assert (engine.full_steps_on_wrong_weights, counters.restores_failed) == (0, 0)
    assert engine.scheduler.mode is Mode.FULL
    assert engine.rank.verify()["residual_intact"]


def test_engine_that_ends_does_not_wait_for_a_permit_to_restore(engine: AsyncEngine) -> None:
    engine.scheduler._page.set_permits(restore_until_s=0.0, fast=True)
    engine.add(14 * BLOCK_TOKENS, 2)
    while engine.scheduler.has_live_requests():
        engine.turn()
    assert engine.scheduler.sum_manager.counters.units_lent > 0
    assert engine.scheduler.has_requests()
    engine.scheduler.leave_lent()
    assert not engine.scheduler.has_requests()


def test_request_in_full_precision_is_as_long_as_the_base_blocks_and_blocks_no_other(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.rng, "random", iter(float(n) for n in range(1, 10_000)).__next__)
    base_tokens = (engine._first_elastic - 1) * BLOCK_TOKENS
    too_long = engine.add(base_tokens + 1, 1, Floor.FULL)
    growing = engine.add(base_tokens - BLOCK_TOKENS, 4 * BLOCK_TOKENS, Floor.FULL)
    small = engine.add(BLOCK_TOKENS, 4)
    engine.run_dry()
    assert engine.ends[too_long] is FinishReason.ERROR
    assert engine.ends[growing] is FinishReason.LENGTH
    assert engine.ends[small] is FinishReason.LENGTH
    assert engine.modes == {Mode.FULL}


def test_commands_ride_in_the_order_of_the_steps(engine: AsyncEngine) -> None:
    """A unit is zeroed with the step that first writes it, not with the one before or after."""
    owned: set[int] = set()
    schedule = engine.scheduler.schedule

    def watch(*args: Any) -> Any:
        output = schedule(*args)
        owned.difference_update(task.unit for task in output.dps.restore)
        owned.update(output.dps.zero)
        for name in output.num_scheduled_tokens:
            (ids,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
            units = {(block - engine._first_elastic) // 2 for block in ids}
            assert {unit for unit in units if unit >= 0} <= owned
        return output

    engine.scheduler.schedule = watch  # type: ignore[method-assign]
    serve_bursts(engine)
    assert engine.scheduler.sum_manager.counters.units_lent > WAVES
