"""What an operator is told about why a request goes to one replica and not to another."""

from typing import Any

import pytest

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.explain import NODE, Candidate, Explanation, explain
from dps_ray.fleet.policies import FullFirst, ModeAware, Policy, PowerOfTwo, RoundRobin
from dps_ray.fleet.scorers import Locality
from dps_ray.fleet.snapshot import Entry, FleetSnapshot, FreshnessOptions, classify
from dps_ray.fleet.state import Health, ReplicaState
from dps_ray.fleet.tally import RouterReport
from dps_ray.modes import Floor, Mode

from .builders import replica_state


def state(replica_id: str, **changes: Any) -> ReplicaState:
    return replica_state(replica_id, **{"deployment": "llm#model", **changes})


def router(*offered: str, application: str = "llm", node_id: str = "here") -> RouterReport:
    return RouterReport(
        router_id="-".join(offered) + node_id,
        application=application,
        node_id=node_id,
        policy="mode_aware",
        version=1,
        offered=offered,
    )


def told(
    *states: ReplicaState,
    routers: list[RouterReport] | None = None,
    policy: Policy | None = None,
    ask: Ask | None = None,
    age_s: float = 0.5,
) -> Explanation:
    options = FreshnessOptions()
    entries = tuple(
        Entry(replica_id=s.replica_id, standing=classify(s, age_s, options), age_s=age_s, state=s)
        for s in states
    )
    return explain(
        FleetSnapshot(version=1, entries=entries),
        [router(*(s.replica_id for s in states))] if routers is None else routers,
        application="llm",
        policy=policy or ModeAware(),
        freshness=options,
        ask=ask or Ask(),
    )


def of(answer: Explanation, replica_id: str) -> Candidate:
    (candidate,) = [each for each in answer.candidates if each.replica_id == replica_id]
    return candidate


def test_replicas_that_get_nothing_are_shown_with_the_filter_that_leaves_them_out() -> None:
    answer = told(
        state("full", running=50),
        state("fast", mode=Mode.FAST),
        state("gone", health=Health.DRAINING),
        ask=Ask(floor=Floor.FULL),
    )
    assert answer.choice == "full"
    assert (of(answer, "full").place, of(answer, "full").tier) == (1, "ready")
    assert of(answer, "fast").why == "gets nothing: left out by filter floor"
    assert of(answer, "gone").why == "gets nothing: left out by filter health"
    assert of(answer, "gone").standing == "draining"
    assert [of(answer, name).place for name in ("fast", "gone")] == [None, None]


def test_demoted_replica_is_told_its_filter_and_the_tier_before_it() -> None:
    answer = told(state("restoring", restoring=True), state("busy", running=30))
    assert [each.replica_id for each in answer.candidates] == ["busy", "restoring"]
    assert of(answer, "restoring").why == (
        "filter restoring puts it into tier restoring, which comes after ready: its turn is when "
        "all before it refuse"
    )


def test_dearer_replica_is_told_what_it_costs_more_and_for_what_the_largest_part_first() -> None:
    answer = told(state("idle"), state("fast", mode=Mode.FAST, running=5))
    assert of(answer, "fast").why == (
        "costs 0.350 more: mode +0.250 (1 instead of 0, times 0.25), "
        "queue +0.100 (5 instead of 0, times 0.02)"
    )
    assert of(told(state("a"), state("b")), "b").why in (
        "equal: drawn by lot",
        "first: lowest cost of the best tier",
    )


def test_replica_that_serve_offers_to_nobody_is_no_candidate_and_shown_as_such() -> None:
    answer = told(state("dead"), state("alive"), routers=[router("alive"), router("alive")])
    assert answer.choice == "alive"
    assert of(answer, "alive").offered_by == 2
    assert (of(answer, "dead").tier, of(answer, "dead").place) == ("not offered", None)
    assert "Serve offers it to no router" in of(answer, "dead").why


def test_replica_that_was_never_heard_is_a_candidate() -> None:
    answer = told(state("known"), routers=[router("known", "new")])
    assert of(answer, "new").tier == "unknown"
    assert of(answer, "new").standing is None


def test_old_figures_make_an_unknown_replica() -> None:
    answer = told(state("a"), age_s=60.0)
    assert of(answer, "a").tier == "unknown"
    assert of(answer, "a").why == "first, although filter freshness puts it into tier unknown"


def test_other_applications_are_left_out() -> None:
    other = state("other", deployment="second#model")
    answer = told(state("a"), other, routers=[router("a"), router("other", application="second")])
    assert [each.replica_id for each in answer.candidates] == ["a"]
    assert answer.routers == 1


def test_no_replica_may_be_there() -> None:
    answer = told(state("fast", mode=Mode.FAST), ask=Ask(floor=Floor.FULL))
    assert answer.choice is None
    assert of(answer, "fast").why == "gets nothing: left out by filter floor"
    assert told().candidates == ()


def test_session_has_one_place_and_the_others_are_told_what_leaving_it_costs() -> None:
    answer = told(*(state(name) for name in "abcd"), ask=Ask(session="s"))
    for each in answer.candidates[1:]:
        assert each.why == "costs 0.200 more: session +0.200 (1 instead of 0, times 0.2)"


def test_another_policy_can_be_tried() -> None:
    fast, full = state("fast", mode=Mode.FAST), state("full", running=40)
    assert told(fast, full).choice == "fast"
    assert told(fast, full, policy=FullFirst()).choice == "full"


@pytest.mark.parametrize("policy", [RoundRobin(), PowerOfTwo()], ids=lambda policy: policy.name)
def test_policy_that_draws_is_not_said_to_go_by_costs(policy: Policy) -> None:
    answer = told(state("a"), state("b", running=9), policy=policy)
    assert {each.why for each in answer.candidates} == {"first: it was drawn", "another was drawn"}
    assert any("whose turn" in what for what in answer.not_known)


def test_what_only_a_router_knows_is_named() -> None:
    near = ModeAware(locality=Locality(weight=1.0))
    one, two = router("a"), router("a", node_id="there")
    assert any("since the replicas reported" in what for what in told(state("a")).not_known)
    assert any("1.0% of requests" in what for what in told(state("a")).not_known)
    assert NODE not in told(state("a"), routers=[one], policy=near).not_known
    assert NODE in told(state("a"), routers=[one, two], policy=near).not_known
    assert any("no router" in what for what in told(state("a"), routers=[]).not_known)
