"""Which replica a policy prefers, and that it never strands a request."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.fleet.policies import ModeAware, PowerOfTwo
from dps_ray.fleet.routing import Candidate, Hint, RoutingPolicy, Tier
from dps_ray.fleet.state import Health
from dps_ray.modes import Mode

from .builders import candidate

POLICIES: list[RoutingPolicy] = [PowerOfTwo(), ModeAware()]


def first(policy: RoutingPolicy, *candidates: Candidate, seed: int = 0) -> str:
    return policy.decide(candidates, random.Random(seed)).order[0]


counts = st.none() | st.integers(0, 200)


@st.composite
def any_candidate(draw: st.DrawFn, replica_id: str) -> Candidate:
    return candidate(
        replica_id,
        age_s=draw(st.sampled_from([None, 0.0, 1.0, 10.0])),
        placed_since=draw(st.integers(-5, 20)),
        queue_len=draw(counts),
        hint=draw(
            st.none()
            | st.builds(
                Hint,
                mode=st.none() | st.sampled_from(Mode),
                restoring=st.none() | st.booleans(),
                dead=st.booleans(),
            )
        ),
        health=draw(st.sampled_from(Health)),
        mode=draw(st.none() | st.sampled_from(Mode)),
        restoring=draw(st.none() | st.booleans()),
        used_blocks=draw(counts),
        headroom_blocks=draw(counts),
        total_blocks=draw(counts),
        running=draw(counts),
        waiting=draw(counts),
    )


@given(st.integers(0, 8).flatmap(lambda n: st.tuples(*(any_candidate(f"r{i}") for i in range(n)))))
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_candidate_is_ordered_once_and_explained(
    policy: RoutingPolicy, candidates: tuple[Candidate, ...]
) -> None:
    decision = policy.decide(candidates, random.Random(1))
    assert Counter(decision.order) == Counter(c.replica_id for c in candidates)
    assert tuple(reason.replica_id for reason in decision.reasons) == decision.order
    keys = [(reason.tier, reason.cost) for reason in decision.reasons]
    assert keys == sorted(keys)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("health", [Health.DEAD, Health.DRAINING])
def test_dead_and_draining_replicas_come_last(policy: RoutingPolicy, health: Health) -> None:
    gone = candidate("gone", health=health)
    busy = candidate("busy", running=90, waiting=30, headroom_blocks=0)
    for seed in range(20):
        assert first(policy, gone, busy, seed=seed) == "busy"


def test_restoring_replica_is_left_alone_however_idle_it_is() -> None:
    restoring = candidate("restoring", mode=Mode.FAST, restoring=True)
    busy = candidate("busy", running=60, waiting=10, used_blocks=95, headroom_blocks=5)
    assert first(ModeAware(), restoring, busy) == "busy"


def test_restoring_replica_serves_when_it_is_the_only_one() -> None:
    assert first(ModeAware(), candidate("only", restoring=True)) == "only"


def test_stale_replica_comes_after_a_live_one_and_before_a_restoring_one() -> None:
    stale = candidate("stale", age_s=30.0)
    live = candidate("live", running=50, headroom_blocks=1)
    restoring = candidate("restoring", restoring=True)
    order = ModeAware().decide([restoring, stale, live], random.Random(0)).order
    assert order == ("live", "stale", "restoring")


def test_serve_statistics_tell_a_restoring_replica_when_pushes_have_stopped() -> None:
    known = candidate("known", age_s=30.0, hint=Hint(restoring=True))
    other = candidate("other", age_s=30.0, queue_len=20)
    assert first(ModeAware(), known, other) == "other"


def test_more_headroom_wins_and_placed_requests_use_it_up() -> None:
    roomy = candidate("roomy", headroom_blocks=90)
    tight = candidate("tight", headroom_blocks=60)
    assert first(ModeAware(), roomy, tight) == "roomy"
    assert first(ModeAware(), candidate("roomy", headroom_blocks=90, placed_since=6), tight) == (
        "tight"
    )


def test_full_mode_is_worth_its_weight_in_headroom() -> None:
    fast = candidate("fast", mode=Mode.FAST, headroom_blocks=100)
    full = candidate("full", headroom_blocks=80)
    assert first(ModeAware(fast_weight=0.25), fast, full) == "full"
    assert first(ModeAware(fast_weight=0.1), fast, full) == "fast"


def test_unknown_headroom_neither_wins_nor_loses() -> None:
    unknown = candidate("unknown", headroom_blocks=None, running=1)
    full_of_room = candidate("known", running=3)
    assert first(ModeAware(), unknown, full_of_room) == "unknown"
    assert first(ModeAware(), candidate("unknown", headroom_blocks=None, running=3), candidate(
        "known", running=1, headroom_blocks=0
    )) == "known"  # fmt: skip


def test_power_of_two_takes_the_shorter_of_two_queues() -> None:
    assert first(PowerOfTwo(), candidate("long", running=9), candidate("short", running=2)) == (
        "short"
    )


def test_power_of_two_ignores_restores() -> None:
    picks = {
        first(PowerOfTwo(), candidate("a", restoring=True), candidate("b"), seed=seed)
        for seed in range(40)
    }
    assert picks == {"a", "b"}


def test_equal_replicas_share_the_requests() -> None:
    rng = random.Random(3)
    policy = ModeAware()
    picks = Counter(
        policy.decide([candidate("a"), candidate("b")], rng).order[0] for _ in range(400)
    )
    assert min(picks.values()) > 120


def test_reasons_tell_tier_and_terms() -> None:
    decision = ModeAware().decide(
        [candidate("a", mode=Mode.FAST, running=2, headroom_blocks=50)], random.Random(0)
    )
    (reason,) = decision.reasons
    assert reason.tier is Tier.READY
    assert dict(reason.terms) == {"queue": 0.04, "headroom": 0.5, "fast": 0.25}
