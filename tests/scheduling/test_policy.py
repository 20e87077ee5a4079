"""Switching policy: watermarks, dwell times, pins; hysteresis under any demand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.policy import Pressure, SwitchLimits, SwitchPolicy

BASE = 100


def limits(
    high: float = 0.9, low: float = 0.6, fast_dwell_s: float = 2.0, full_dwell_s: float = 1.0
) -> SwitchLimits:
    return SwitchLimits(high, low, fast_dwell_s, full_dwell_s)


def demand(used: int, waiting: int = 0, waiting_blocks: int | None = None) -> Pressure:
    return Pressure(used, BASE, waiting, waiting_blocks)


def advance(policy: SwitchPolicy, used: int, now: float, *, backed: bool = True) -> Mode:
    """Plan and record one step under ``Pin.AUTO``."""
    allowed = Mode.FULL if backed else Mode.FAST
    mode = policy.next_mode(demand(used), Pin.AUTO, allowed=allowed, now=now)
    policy.note_mode(mode, now)
    return mode


def test_demand_at_the_high_watermark_goes_fast_without_a_lend_and_returns_at_the_low_one():
    policy = SwitchPolicy(limits())
    used = [89, 90, 80, 61, 60, 89]
    modes = [advance(policy, blocks, now=10.0 * step) for step, blocks in enumerate(used)]
    assert modes == [Mode.FULL, Mode.FAST, Mode.FAST, Mode.FAST, Mode.FULL, Mode.FULL]


def test_waiting_blocks_count_as_demand():
    policy = SwitchPolicy(limits())
    assert not policy.wants_fast(demand(50, 1, 39), 0.0)
    assert policy.wants_fast(demand(50, 1, 40), 0.0)
    assert not policy.may_restore(demand(50, 1, 11), Pin.AUTO, 0.0)
    assert policy.may_restore(demand(50, 1, 10), Pin.AUTO, 0.0)


def test_waiting_request_of_unknown_size_holds_back_the_restore():
    assert not SwitchPolicy(limits()).may_restore(demand(0, 1), Pin.AUTO, 0.0)


def test_high_watermark_of_one_leaves_the_switch_to_lending():
    policy = SwitchPolicy(limits(high=1.0))
    assert not policy.wants_fast(demand(100, 9, 900), 0.0)
    assert policy.may_lend(Pin.AUTO, 0.0)


def test_return_begun_at_the_low_watermark_completes_when_demand_grows_meanwhile():
    policy = SwitchPolicy(limits())
    policy.note_lend(0.0)
    assert advance(policy, 100, 0.0, backed=False) is Mode.FAST
    assert advance(policy, 60, 5.0, backed=False) is Mode.FAST
    assert advance(policy, 89, 6.0, backed=True) is Mode.FULL


def test_lend_during_the_return_calls_for_the_low_watermark_again():
    policy = SwitchPolicy(limits())
    policy.note_lend(0.0)
    advance(policy, 100, 0.0, backed=False)
    advance(policy, 60, 5.0, backed=False)
    policy.note_lend(6.0)
    assert advance(policy, 89, 9.0) is Mode.FAST
    assert advance(policy, 60, 10.0) is Mode.FULL


def test_fast_dwell_counts_from_the_latest_lend():
    policy = SwitchPolicy(limits())
    policy.note_lend(0.0)
    advance(policy, 100, 0.0, backed=False)
    policy.note_lend(1.5)
    assert not policy.may_restore(demand(0), Pin.AUTO, 3.0)
    assert policy.may_restore(demand(0), Pin.AUTO, 3.5)


def test_full_dwell_refuses_lending_after_a_return_but_not_at_start_up():
    policy = SwitchPolicy(limits())
    assert policy.may_lend(Pin.AUTO, 0.0)
    advance(policy, 95, 0.0)
    advance(policy, 0, 2.0)
    assert not policy.may_lend(Pin.AUTO, 2.9)
    assert not policy.wants_fast(demand(95), 2.9)
    assert policy.may_lend(Pin.AUTO, 3.0)


@pytest.mark.parametrize(
    ("pin", "lends", "restores", "mode"),
    [(Pin.FULL, False, True, Mode.FULL), (Pin.FAST, True, False, Mode.FAST)],
)
def test_pin_overrules_demand_and_dwell(pin, lends, restores, mode):
    for used in (0, 75, 100):
        policy = SwitchPolicy(limits())
        policy.note_lend(0.0)
        assert policy.may_lend(pin, 0.0) is lends
        assert policy.may_restore(demand(used, 3), pin, 0.0) is restores
        assert policy.next_mode(demand(used), pin, allowed=Mode.FULL, now=0.0) is mode


def test_missing_segment_keeps_even_a_full_pin_fast():
    policy = SwitchPolicy(limits())
    assert policy.next_mode(demand(0), Pin.FULL, allowed=Mode.FAST, now=0.0) is Mode.FAST


step = st.tuples(
    st.floats(0.0, 3.0),
    st.integers(0, 2 * BASE),
    st.booleans(),
    st.booleans(),
)


@given(
    high=st.floats(0.61, 1.0),
    dwells=st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)),
    steps=st.lists(step, max_size=60),
)
def test_no_two_switches_are_closer_than_the_dwell(high, dwells, steps):
    fast_dwell_s, full_dwell_s = dwells
    policy = SwitchPolicy(limits(high, 0.6, fast_dwell_s, full_dwell_s))
    now, switched_s, backed = 0.0, None, True
    for elapsed_s, used, lend, finish in steps:
        now += elapsed_s
        backed = backed or finish
        if lend and policy.may_lend(Pin.AUTO, now):
            policy.note_lend(now)
            backed = False
        before = policy.mode
        if advance(policy, used, now, backed=backed) is before:
            continue
        if switched_s is not None:
            dwell_s = fast_dwell_s if before is Mode.FAST else full_dwell_s
            assert now - switched_s >= dwell_s
        switched_s = now


@given(
    used=st.integers(0, 2 * BASE),
    high=st.floats(0.61, 1.0),
    before=st.sampled_from(Mode),
    gaps=st.lists(st.floats(0.0, 10.0), max_size=40),
)
def test_constant_demand_switches_once_at_most(used, high, before, gaps):
    policy = SwitchPolicy(limits(high, fast_dwell_s=1.0, full_dwell_s=0.5), before)
    now, modes = 0.0, [before]
    for gap_s in gaps:
        now += gap_s
        modes.append(advance(policy, used, now))
    assert sum(left is not right for left, right in itertools.pairwise(modes)) <= 1
