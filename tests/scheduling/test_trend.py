"""Demand projected along its slope, and what the switching policy makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.policy import Pressure, SwitchLimits, SwitchPolicy
from dps_ray.scheduling.trend import DemandTrend

BASE = 100
PASSED_S = st.integers(0, 5_000_000).map(lambda microseconds: microseconds * 1e-6)


def pressed(used: int) -> Pressure:
    return Pressure(used, BASE)


def test_steady_growth_is_found_and_projected_one_horizon_ahead() -> None:
    trend = DemandTrend(2.0)
    for step in range(200):
        trend.observe(10 + 3 * step, 0.1 * step)
    assert trend.blocks_per_s == pytest.approx(30.0, rel=1e-3)
    assert trend.ahead(100) == pytest.approx(160.0, rel=1e-3)


def test_falling_demand_is_not_counted_on() -> None:
    trend = DemandTrend(2.0)
    for step in range(50):
        trend.observe(500 - 10 * step, 0.1 * step)
    assert trend.blocks_per_s < -90
    assert trend.ahead(20) == 20


@given(st.lists(st.tuples(PASSED_S, st.integers(0, 1000)), max_size=30))
def test_without_a_horizon_only_the_moment_counts(history: list[tuple[float, int]]) -> None:
    trend, now = DemandTrend(0.0), 0.0
    for passed_s, demand in history:
        now += passed_s
        trend.observe(demand, now)
        assert trend.ahead(demand) == demand


@given(st.lists(st.tuples(PASSED_S, st.integers(0, 1000)), min_size=2, max_size=30))
def test_the_slope_never_exceeds_the_steepest_seen(history: list[tuple[float, int]]) -> None:
    trend, now, steepest, last = DemandTrend(1.0), 0.0, 0.0, None
    for passed_s, demand in history:
        now += passed_s
        if last is not None and now > last[0]:
            steepest = max(steepest, abs(demand - last[1]) / (now - last[0]))
        if last is None or now > last[0]:
            last = (now, demand)
        trend.observe(demand, now)
        assert abs(trend.blocks_per_s) <= steepest * (1 + 1e-9)


def rising(policy: SwitchPolicy, rate: int) -> int:
    """Demand that grows by ``rate`` blocks every 0.1 s until the policy wants fast mode."""
    for step in range(1000):
        policy.observe(pressed(rate * step), 0.1 * step)
        if policy.wants_fast(pressed(rate * step), 0.1 * step):
            return rate * step
    raise AssertionError("never")


def test_a_steep_burst_is_met_earlier_than_a_slow_one() -> None:
    def policy() -> SwitchPolicy:
        return SwitchPolicy(SwitchLimits(0.9, 0.5, 0.0, 0.0, trend_horizon_s=1.0))

    assert rising(policy(), rate=4) < rising(policy(), rate=1) <= 90


def test_a_return_waits_while_demand_grows_and_begins_when_it_no_longer_does() -> None:
    policy = SwitchPolicy(SwitchLimits(1.0, 0.6, 0.0, 0.0, trend_horizon_s=1.0), Mode.FAST)
    for step in range(11):
        policy.observe(pressed(5 * step), 0.1 * step)
    assert not policy.may_restore(pressed(50), Pin.AUTO, 1.0)
    for step in range(11, 40):
        policy.observe(pressed(50), 0.1 * step)
    assert policy.may_restore(pressed(50), Pin.AUTO, 4.0)
