"""What an engine's status page shows, and how soon."""

import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool

from dps_ray.commands import StepCommand
from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.engine.publisher import PERIOD_S, StatusPublisher
from dps_ray.engine.rank_reports import RankReports
from dps_ray.engine.status_page import StatusPage
from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.policy import Pressure, SwitchLimits
from dps_ray.scheduling.sum_manager import SumManager
from dps_ray.status import EngineStatus

STEP = StepCommand(Mode.FULL)


class Publishing:
    """A publisher at a time of the test's choosing, and what readers see."""

    def __init__(self, page: StatusPage) -> None:
        self.now_s, self._page = 100.0, page
        plain = BlockPool(12, enable_caching=False, hash_block_size=16)
        pool = ElasticBlockPool.make_elastic(plain, 6, 3)
        limits = SwitchLimits(1.0, 0.6, 0.0, 0.0)
        self.manager = pool.manager = SumManager(
            UnitLedger(2, 3), limits, pool, clock=lambda: self.now_s
        )
        pool.precision = SimpleNamespace()  # type: ignore[assignment]
        self.publisher = StatusPublisher(
            page, self.manager, pool, RankReports(page, 1), 64, clock=lambda: self.now_s
        )

    def seen(self, running: int = 1) -> EngineStatus:
        self.publisher.publish(running=running, waiting=0, full_requests=0)
        return self.read()

    def read(self) -> EngineStatus:
        status = self._page.read()
        assert status is not None
        return status


@pytest.fixture
def publishing() -> Iterator[Publishing]:
    page = StatusPage.create(f"test-{uuid.uuid4().hex[:12]}")
    yield Publishing(page)
    page.remove()


def test_counters_of_a_running_engine_are_never_older_than_the_period(
    publishing: Publishing,
) -> None:
    first = publishing.seen()
    publishing.publisher.count_tokens(STEP, 3)
    publishing.now_s += PERIOD_S / 2
    assert publishing.seen() == first
    publishing.now_s += PERIOD_S / 2
    assert publishing.seen().tokens_full == 3


def test_a_request_that_ends_is_seen_at_once_with_all_its_tokens(publishing: Publishing) -> None:
    publishing.seen()
    publishing.publisher.count_tokens(STEP, 3)
    assert (publishing.seen(running=0).running, publishing.seen(running=0).tokens_full) == (0, 3)


def test_a_switch_and_a_pin_are_seen_at_once(publishing: Publishing) -> None:
    assert publishing.seen().mode is Mode.FULL
    publishing.manager.set_pin(Pin.FAST)
    assert publishing.seen().pin is Pin.FAST
    publishing.manager.plan_step(Pressure(0, 5))
    assert publishing.seen().mode is Mode.FAST
    assert publishing.manager.lend_for(1)
    assert publishing.seen().units_kv == 1


def test_requests_that_come_and_go_between_plans_are_seen_at_once(publishing: Publishing) -> None:
    first = publishing.seen()
    publishing.publisher.count_tokens(STEP, 3)
    publishing.publisher.publish_counts(running=1, waiting=0, full_requests=0)
    assert publishing.read() == first
    publishing.publisher.publish_counts(running=1, waiting=2, full_requests=0)
    assert (publishing.read().waiting, publishing.read().tokens_full) == (2, 3)
    publishing.publisher.count_tokens(STEP, 3)
    publishing.now_s += PERIOD_S
    publishing.publisher.publish_counts(running=1, waiting=2, full_requests=0)
    assert publishing.read().tokens_full == 6
