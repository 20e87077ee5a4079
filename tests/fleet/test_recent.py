"""Decisions that a router keeps: what they were made of, not what is true by now."""

import numpy as np

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.policies import ModeAware
from dps_ray.fleet.recent import Kept, RecentDecisions
from dps_ray.fleet.routing import Tier
from dps_ray.fleet.view import FleetView
from dps_ray.modes import Floor, Mode

from .builders import columns_of, given_replica, replica_state
from .test_view import peers, publication


def found(view: FleetView, request_id: str) -> object:
    assert view.tally.look_up([request_id])
    (told,) = view.report("router").found
    return told


def kept(*names: str) -> Kept:
    columns = columns_of(*(given_replica(name) for name in names))
    decision = ModeAware().build(np.random.default_rng(0)).decide(columns, Ask(), {}, limit=9)
    return Kept(0.0, "mode_aware", Ask(), decision)


def test_reasons_are_those_of_the_moment_of_the_decision() -> None:
    view = FleetView(np.random.default_rng(0))
    view.offer(peers("a", "b"), 0.0)
    view.merge(publication(replica_state("a"), replica_state("b", running=4)), 0.0)
    decision = view.decide(0.1, Ask(session="s"), limit=2, request_id="r")
    expected = decision.reasons()
    for number in range(9):
        view.pick(str(number), "a", 0.2)
    view.note_queue_len("a", 70, 0.2)
    changed = replica_state("a", 2, mode=Mode.FAST, restoring=True, running=90)
    view.merge(publication(changed, version=2), 0.3)
    view.decide(0.3, limit=2, request_id="other")
    told = found(view, "r")
    assert told.reasons == expected
    assert (told.request_id, told.order, told.session) == ("r", decision.order, True)
    view.offer(peers("b"), 0.4)
    assert found(view, "r") == told


def test_latest_decision_about_a_request_is_told_with_their_number_and_who_took_it() -> None:
    view = FleetView(np.random.default_rng(0))
    view.offer(peers("a"), 0.0)
    view.merge(publication(replica_state("a", mode=Mode.FAST)), 0.0)
    ask = Ask(floor=Floor.FULL)
    view.decide(0.1, ask, limit=2, request_id="r")
    assert found(view, "r").order == ()
    view.merge(publication(replica_state("a", 2), version=2), 0.2)
    view.decide(0.2, ask, limit=2, request_id="r")
    assert found(view, "r").accepted_by is None
    view.tally.accepted("r", "a")
    told = found(view, "r")
    assert (told.order, told.decisions, told.accepted_by) == (("a",), 2, "a")
    assert told.reasons[0].tier is Tier.READY


def test_what_nobody_asks_for_is_told_to_nobody() -> None:
    view = FleetView(np.random.default_rng(0))
    view.offer(peers("a"), 0.0)
    view.decide(0.1, limit=1, request_id="r")
    assert not view.tally.look_up(["unheard of"])
    assert view.report("router").found == ()


def test_oldest_requests_are_forgotten_beyond_either_bound() -> None:
    by_requests = RecentDecisions(max_requests=2)
    for name in "xyz":
        by_requests.note(name, kept("a"))
    assert [by_requests.find(name) is not None for name in "xyz"] == [False, True, True]
    by_candidates = RecentDecisions(max_candidates=5)
    for name in "xyz":
        by_candidates.note(name, kept("a", "b"))
        by_candidates.note(name, kept("a", "b"))
    assert [by_candidates.find(name) is not None for name in "xyz"] == [False, True, True]


def test_long_id_that_a_client_chose_is_found_and_takes_no_more_memory() -> None:
    recent = RecentDecisions()
    recent.note("x" * 10_000, kept("a"))
    recent.accepted("x" * 10_000, "a")
    told = recent.find("x" * 10_000)
    assert told is not None
    assert told.accepted_by == "a"
    assert max(map(len, recent._kept)) == 128


def test_example_of_a_report_shows_the_best_and_some_of_those_left_out() -> None:
    columns = columns_of(
        *(given_replica(f"full{n}", running=n) for n in range(20)),
        *(given_replica(f"fast{n}", mode=Mode.FAST) for n in range(20)),
    )
    ask = Ask(floor=Floor.FULL)
    decision = ModeAware().build(np.random.default_rng(0)).decide(columns, ask, {}, limit=16)
    told = Kept(0.0, "mode_aware", ask, decision).brief()
    assert [reason.replica_id for reason in told.reasons[:8]] == [f"full{n}" for n in range(8)]
    assert {reason.tier for reason in told.reasons[8:]} == {Tier.EXCLUDED}
    assert len(told.reasons) == 16
