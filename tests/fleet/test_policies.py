"""Which replica a policy prefers."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.pickers import Probe
from dps_ray.fleet.policies import (
    POLICIES,
    FullFirst,
    LeastPressure,
    ModeAware,
    Policy,
    PowerOfTwo,
    RoundRobin,
)
from dps_ray.fleet.routing import Hint, Tier
from dps_ray.fleet.scorers import Headroom, Locality, Precision
from dps_ray.fleet.state import Health
from dps_ray.modes import Floor, Mode

from .builders import Given, columns_of, decide, given_replica

ALL = [kind() for kind in POLICIES.values()]
NO_PROBES = Probe(share=0.0)


def first(policy: Policy, *replicas: Given, **options: Any) -> str:
    return decide(policy, *replicas, **options).order[0]


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
@pytest.mark.parametrize("health", [Health.DEAD, Health.DRAINING])
def test_dead_and_draining_replicas_get_nothing(policy: Policy, health: Health) -> None:
    gone = given_replica("gone", health=health)
    busy = given_replica("busy", running=90, waiting=30, headroom_blocks=0)
    assert decide(policy, gone, busy).order == ("busy",)
    assert decide(policy, gone).order == ()


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
def test_request_that_insists_on_full_precision_never_meets_fast_mode(policy: Policy) -> None:
    fast = given_replica("fast", mode=Mode.FAST)
    full = given_replica("full", running=90, headroom_blocks=0)
    assert decide(policy, fast, full, ask=Ask(floor=Floor.FULL)).order == ("full",)
    assert decide(policy, fast, ask=Ask(floor=Floor.FULL)).order == ()


def test_request_that_prefers_full_precision_takes_fast_rather_than_nothing() -> None:
    fast = given_replica("fast", mode=Mode.FAST)
    full = given_replica("full", running=90, headroom_blocks=0)
    ask = Ask(floor=Floor.PREFER_FULL)
    assert decide(ModeAware(), fast, full, ask=ask).order == ("full", "fast")
    assert decide(ModeAware(), fast, ask=ask).order == ("fast",)


def test_full_first_asks_for_full_precision_on_behalf_of_every_request() -> None:
    fast = given_replica("fast", mode=Mode.FAST)
    full = given_replica("full", running=90, headroom_blocks=0)
    assert first(ModeAware(), fast, full) == "fast"
    assert first(FullFirst(), fast, full) == "full"


def test_restoring_replica_is_left_alone_however_idle_it_is() -> None:
    restoring = given_replica("restoring", mode=Mode.FAST, restoring=True)
    busy = given_replica("busy", running=60, waiting=10, used_blocks=95, headroom_blocks=5)
    assert first(ModeAware(), restoring, busy) == "busy"
    assert first(LeastPressure(), restoring, busy) == "restoring"


def test_restoring_replica_serves_when_it_is_the_only_one() -> None:
    assert first(ModeAware(), given_replica("only", restoring=True)) == "only"


def test_stale_replica_comes_after_a_live_one_and_before_a_restoring_one() -> None:
    stale = given_replica("stale", age_s=30.0)
    live = given_replica("live", running=50, headroom_blocks=1)
    restoring = given_replica("restoring", restoring=True)
    order = decide(ModeAware(probe=NO_PROBES), restoring, stale, live).order
    assert order == ("live", "stale", "restoring")


def test_small_share_of_requests_probes_stale_replicas_and_none_a_restoring_one() -> None:
    stale = given_replica("stale", age_s=30.0)
    live = given_replica("live")
    restoring = given_replica("restoring", restoring=True)
    pipeline = ModeAware(probe=Probe(share=0.1)).build(np.random.default_rng(0))
    columns = columns_of(stale, live, restoring)
    decisions = [pipeline.decide(columns, Ask(), {}, limit=3) for _ in range(1000)]
    picks = Counter(decision.order[0] for decision in decisions)
    assert 60 < picks["stale"] < 140
    assert picks["restoring"] == 0
    assert {decision.order[0] for decision in decisions if decision.probe} == {"stale"}


def test_serve_statistics_tell_a_restoring_replica_when_pushes_have_stopped() -> None:
    known = given_replica("known", age_s=30.0, hint=Hint(restoring=True))
    other = given_replica("other", age_s=30.0, queue_len=20)
    assert first(ModeAware(), known, other) == "other"


def test_blind_router_goes_by_the_queue_lengths_that_serve_has_heard() -> None:
    long = given_replica("long", age_s=None, queue_len=9)
    short = given_replica("short", age_s=None, queue_len=2)
    assert first(ModeAware(), long, short) == "short"


def test_more_headroom_wins_and_placed_requests_use_it_up() -> None:
    roomy = given_replica("roomy", headroom_blocks=90)
    tight = given_replica("tight", headroom_blocks=60)
    assert first(ModeAware(), roomy, tight) == "roomy"
    pressed = given_replica("roomy", headroom_blocks=90, placed_since=6)
    assert first(ModeAware(), pressed, tight) == "tight"


def test_full_mode_is_worth_its_weight_in_headroom() -> None:
    fast = given_replica("fast", mode=Mode.FAST, headroom_blocks=100)
    full = given_replica("full", headroom_blocks=80)
    assert first(ModeAware(mode=Precision(weight=0.25)), fast, full) == "full"
    assert first(ModeAware(mode=Precision(weight=0.1)), fast, full) == "fast"


def test_unknown_headroom_neither_wins_nor_loses() -> None:
    unknown = given_replica("unknown", headroom_blocks=None, running=1)
    full_of_room = given_replica("known", running=3)
    assert first(ModeAware(), unknown, full_of_room) == "unknown"
    busier = given_replica("unknown", headroom_blocks=None, running=3)
    assert first(ModeAware(), busier, given_replica("known", running=1, headroom_blocks=0)) == (
        "known"
    )


@pytest.mark.parametrize("policy", [ModeAware(), PowerOfTwo()], ids=lambda policy: policy.name)
def test_replica_that_knows_nothing_is_no_idle_one(policy: Policy) -> None:
    nothing = {"mode": None, "headroom_blocks": None, "running": None, "waiting": None}
    unknown = given_replica("unknown", **nothing)
    busy, idle = given_replica("busy", running=3), given_replica("idle")
    picks = Counter(first(policy, unknown, busy, seed=seed) for seed in range(200))
    assert min(picks.values()) > 60
    assert {first(policy, unknown, busy, idle, seed=seed) for seed in range(20)} <= {
        "idle",
        "unknown",
    }


def test_unknown_replica_gets_no_more_than_its_share_of_a_burst() -> None:
    unknown = given_replica("unknown", running=None, waiting=None, headroom_blocks=None)
    columns = columns_of(unknown, given_replica("a", running=4), given_replica("b", running=4))
    pipeline = ModeAware(probe=NO_PROBES).build(np.random.default_rng(0))
    for _ in range(30):
        (name,) = pipeline.decide(columns, Ask(), {}, limit=1).order
        columns.open_requests[columns.index[name]] += 1
    assert columns.open_requests.tolist() == pytest.approx([10, 10, 10], abs=1)


def test_unknown_mode_costs_neither_as_little_as_full_nor_as_much_as_fast() -> None:
    unknown = given_replica("unknown", mode=None)
    order = decide(
        ModeAware(), given_replica("fast", mode=Mode.FAST), unknown, given_replica("full")
    ).order
    assert order == ("full", "unknown", "fast")


def test_unknown_number_of_waiting_requests_is_not_none_waiting() -> None:
    unknown = given_replica("unknown", waiting=None, headroom_blocks=60, running=1, used_blocks=8)
    busy = given_replica("busy", waiting=1, headroom_blocks=60, running=1, used_blocks=8)
    picks = Counter(first(ModeAware(), unknown, busy, seed=seed) for seed in range(200))
    assert min(picks.values()) > 60


def test_cached_prefix_attracts_until_the_queue_outweighs_it() -> None:
    cached = given_replica("cached", running=3)
    idle = given_replica("idle", running=0)
    assert first(ModeAware(), cached, idle) == "idle"
    assert first(ModeAware(), cached, idle, matches={"cached": 1.0}) == "cached"
    crowded = given_replica("cached", running=30)
    assert first(ModeAware(), crowded, idle, matches={"cached": 1.0}) == "idle"


def test_session_stays_on_its_replica_and_moves_only_when_that_leaves() -> None:
    replicas = [given_replica(f"r{i}") for i in range(8)]
    homes = {s: first(ModeAware(), *replicas, ask=Ask(session=s)) for s in map(str, range(60))}
    assert len(set(homes.values())) > 4
    left = [given for given in replicas if given.replica_id != "r3"]
    for session, home in homes.items():
        for seed in range(3):
            now = first(ModeAware(), *left, ask=Ask(session=session), seed=seed)
            assert (now == home) == (home != "r3")


def test_own_node_is_preferred_where_locality_has_a_weight() -> None:
    near, far = given_replica("near", node_id="here"), given_replica("far", node_id="there")
    policy = ModeAware(locality=Locality(weight=0.1))
    assert {first(policy, far, near, seed=seed) for seed in range(20)} == {"near"}


def test_power_of_two_takes_the_shorter_of_two_queues() -> None:
    long, short = given_replica("long", running=9), given_replica("short", running=2)
    assert {first(PowerOfTwo(), long, short, seed=seed) for seed in range(20)} == {"short"}


def test_power_of_two_ignores_restores() -> None:
    replicas = [given_replica("a", restoring=True), given_replica("b")]
    assert {first(PowerOfTwo(), *replicas, seed=seed) for seed in range(40)} == {"a", "b"}


def test_round_robin_takes_one_after_the_other() -> None:
    pipeline = RoundRobin().build(np.random.default_rng(0))
    columns = columns_of(*(given_replica(name, running=9) for name in "abc"))
    picks = [pipeline.decide(columns, Ask(), {}, limit=3).order[0] for _ in range(6)]
    assert picks == ["a", "b", "c", "a", "b", "c"]


def test_equal_replicas_share_the_requests() -> None:
    pipeline = ModeAware().build(np.random.default_rng(3))
    columns = columns_of(given_replica("a"), given_replica("b"))
    picks = Counter(pipeline.decide(columns, Ask(), {}, limit=1).order[0] for _ in range(400))
    assert min(picks.values()) > 120


def test_reasons_tell_the_filters_and_every_term_with_its_weight() -> None:
    replica = given_replica("a", mode=Mode.FAST, restoring=True, running=2, headroom_blocks=50)
    policy = ModeAware(headroom=Headroom(weight=2.0))
    (reason,) = decide(policy, replica).reasons()
    assert reason.tier is Tier.RESTORING
    assert reason.demoted_by == (("restoring", Tier.RESTORING),)
    terms = {term.scorer: (term.value, term.weight) for term in reason.terms}
    assert terms == {"mode": (1.0, 0.25), "headroom": (0.5, 2.0), "queue": (2.0, 0.02)}
    assert reason.cost == pytest.approx(0.25 + 1.0 + 0.04)
