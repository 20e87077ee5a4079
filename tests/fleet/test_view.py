"""A router's knowledge: publications, age, and its own requests on top."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.in_flight import InFlight
from dps_ray.fleet.pickers import Probe
from dps_ray.fleet.policies import ModeAware, Policy, PowerOfTwo
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.routing import Peer, Reason, Tier
from dps_ray.fleet.snapshot import Entry, FleetSnapshot, FreshnessOptions, Standing
from dps_ray.fleet.state import Health, ReplicaState
from dps_ray.fleet.view import FleetView

from .builders import replica_state

CALM = ModeAware(probe=Probe(share=0.0))


def publication(
    *states: ReplicaState, version: int = 1, age_s: float = 0.0, routing: Policy = CALM
) -> Publication:
    entries = tuple(
        Entry(replica_id=state.replica_id, standing=Standing.LIVE, age_s=age_s, state=state)
        for state in states
    )
    return Publication(
        snapshot=FleetSnapshot(version=version, entries=entries),
        routing=routing,
        freshness=FreshnessOptions(),
    )


def peers(*replica_ids: str) -> list[Peer]:
    return [Peer(replica_id) for replica_id in replica_ids]


def view_of(*replica_ids: str) -> FleetView:
    view = FleetView(np.random.default_rng(0))
    view.offer(peers(*replica_ids), 0.0)
    return view


def reasons(view: FleetView, now_s: float) -> dict[str, Reason]:
    found = view.decide(now_s, limit=9).reasons()
    return {reason.replica_id: reason for reason in found}


def load(view: FleetView, replica_id: str, now_s: float) -> float:
    terms = reasons(view, now_s)[replica_id].terms
    return next(term.value for term in terms if term.scorer == "queue")


def test_queue_length_that_serve_heard_long_ago_says_nothing() -> None:
    view = view_of("old", "new")
    view.note_queue_len("old", 1, 0.0)
    view.note_queue_len("new", 7, 8.0)
    assert [load(view, name, 9.9) for name in ("old", "new")] == [1, 7]
    # Serve tells the replica set anew, which makes no queue length younger.
    view.offer(peers("other", "old", "new"), 9.9)
    assert [load(view, name, 11.0) for name in ("old", "new")] == [7, 7]
    assert [load(view, name, 100_000.0) for name in ("old", "new")] == [0, 0]


def test_figures_that_are_reported_again_and_again_grow_old_in_the_router_too() -> None:
    view = view_of("a")
    for second in range(6):
        state = replica_state("a", sequence=second, running=5)
        view.merge(publication(state, version=second, age_s=float(second)), float(second))
        expected = Tier.READY if second <= 3.5 else Tier.UNKNOWN
        assert reasons(view, float(second))["a"].tier is expected


def test_replica_whose_connection_broke_gets_nothing_until_it_is_heard_again() -> None:
    view = view_of("a", "b")
    view.merge(publication(replica_state("a"), replica_state("b")), 0.0)
    lost = Entry(
        replica_id="a", standing=Standing.DEAD, age_s=0.1, state=replica_state("a"), lost_ago_s=0.0
    )
    telling = publication(version=2)
    snapshot = telling.snapshot.model_copy(update={"entries": (lost,)})
    view.merge(telling.model_copy(update={"snapshot": snapshot}), 0.1)
    assert [view.decide(0.1, limit=9).order for _ in range(20)] == [("b",)] * 20
    assert view.decide(3.5, limit=9).order == ("b",)
    # It still stands: Serve would have withdrawn a dead one.
    assert set(view.decide(3.7, limit=9).order) == {"a", "b"}
    view.merge(publication(replica_state("a", sequence=5), version=3), 3.9)
    assert reasons(view, 3.9)["a"].tier is Tier.READY


def test_unheard_replica_is_a_candidate_of_which_nothing_is_known() -> None:
    assert reasons(view_of("new"), 0.0)["new"].tier is Tier.UNKNOWN


def test_entries_age_on_the_routers_own_clock_without_any_message() -> None:
    view = view_of("a")
    view.merge(publication(replica_state("a"), age_s=1.0), 10.0)
    assert reasons(view, 12.5)["a"].tier is Tier.READY
    assert reasons(view, 12.6)["a"].tier is Tier.UNKNOWN


def test_refreshed_entry_is_ready_again() -> None:
    view = view_of("a")
    view.merge(publication(replica_state("a")), 10.0)
    assert reasons(view, 20.0)["a"].tier is Tier.UNKNOWN
    view.merge(publication(replica_state("a", sequence=2), version=2), 20.0)
    assert reasons(view, 20.0)["a"].tier is Tier.READY


def test_changed_age_limit_counts_at_once() -> None:
    view = view_of("a")
    view.merge(publication(replica_state("a")), 10.0)
    patient = publication().model_copy(update={"freshness": FreshnessOptions(stale_after_s=30.0)})
    assert reasons(view, 20.0)["a"].tier is Tier.UNKNOWN
    view.merge(patient, 20.0)
    assert reasons(view, 20.0)["a"].tier is Tier.READY


def test_publication_that_does_not_mention_a_replica_leaves_what_is_known_of_it() -> None:
    view = view_of("a", "b")
    view.merge(publication(replica_state("a"), replica_state("b")), 10.0)
    view.merge(publication(replica_state("a", sequence=2), version=2), 11.0)
    assert {reason.tier for reason in reasons(view, 11.5).values()} == {Tier.READY}


@pytest.mark.parametrize("health", [Health.DEAD, Health.DRAINING])
def test_replica_that_has_left_counts_as_unheard_once_it_is_forgotten(health: Health) -> None:
    view = view_of("a", "b")
    view.merge(publication(replica_state("a", health=health)), 0.0)
    assert reasons(view, 59.0)["a"].tier is Tier.EXCLUDED
    view.merge(publication(replica_state("b"), version=2), 61.0)
    assert reasons(view, 61.0)["a"].tier is Tier.UNKNOWN


def test_policy_comes_from_the_controller() -> None:
    view = view_of("a")
    view.merge(publication(routing=PowerOfTwo()), 0.0)
    assert view.report("me").policy == "power_of_two"


def test_requests_placed_since_the_report_are_added_and_finished_ones_taken_off() -> None:
    view = view_of("a")
    view.pick("old", "a", 1.0)
    view.merge(publication(replica_state("a", running=3), age_s=0.5), 2.0)
    assert load(view, "a", 2.0) == 3
    view.pick("new", "a", 2.5)
    assert load(view, "a", 2.6) == 4
    view.finish("old", "a", 2.7)
    view.finish("new", "a", 2.8)
    assert load(view, "a", 2.9) == 2


def test_own_requests_outlive_a_change_of_the_replica_set() -> None:
    view = view_of("a", "b")
    view.pick("one", "a", 1.0)
    view.note_queue_len("a", 7, 1.0)
    view.offer(peers("b", "a", "c"), 2.0)
    assert (view.open_requests("a"), load(view, "a", 2.0)) == (1, 7)
    view.offer(peers("b"), 3.0)
    view.offer(peers("a", "b"), 4.0)
    assert (view.open_requests("a"), load(view, "a", 4.0)) == (0, 0)


def test_burst_between_two_reports_is_spread_over_equal_replicas() -> None:
    view = view_of("a", "b")
    view.merge(publication(replica_state("a"), replica_state("b")), 0.0)
    for number in range(40):
        now_s = 0.1 + number * 1e-4
        view.pick(str(number), view.decide(now_s, limit=1).order[0], now_s)
    assert abs(view.open_requests("a") - view.open_requests("b")) <= 1


def test_prompt_goes_where_its_prefix_went_before() -> None:
    view = view_of("a", "b", "c")
    view.merge(publication(*(replica_state(name) for name in "abc")), 0.0)
    ask = Ask(prefix=(11, 22, 33))
    view.accept("first", "b", 0.1, ask)
    view.finish("first", "b", 0.2)
    picks = {view.decide(0.3, Ask(prefix=(11, 22, 99)), limit=1).order[0] for _ in range(20)}
    assert picks == {"b"}


def test_pick_that_was_never_accepted_is_given_up() -> None:
    open_requests = InFlight(pick_timeout_s=5.0)
    open_requests.pick("left", "a", 0.0)
    open_requests.pick("served", "a", 0.0)
    open_requests.accept("served", "a", 0.1)
    open_requests.expire(5.1)
    assert open_requests.count("a") == 1


def test_request_that_ended_before_its_acceptance_was_told_is_not_counted_for_ever() -> None:
    open_requests = InFlight()
    open_requests.pick("short", "a", 0.0)
    open_requests.finish("short", "a", 0.1)
    open_requests.accept("short", "a", 0.2)
    assert open_requests.count("a") == 0
    open_requests.pick("refused", "a", 0.3)
    open_requests.finish("refused", "a", 0.4)
    open_requests.accept("refused", "b", 0.5)
    assert (open_requests.count("a"), open_requests.count("b")) == (0, 1)


def test_request_that_ended_on_another_replica_than_the_one_picked_is_not_counted_for_ever() -> (
    None
):
    open_requests = InFlight(pick_timeout_s=5.0)
    open_requests.pick("moved", "a", 0.0)
    open_requests.finish("moved", "b", 0.1)
    open_requests.accept("moved", "b", 0.2)
    assert (open_requests.count("a"), open_requests.count("b")) == (0, 0)
    open_requests.pick("slow", "a", 1.0)
    open_requests.expire(7.0)
    open_requests.finish("slow", "a", 7.1)
    open_requests.accept("slow", "a", 7.2)
    assert open_requests.count("a") == 0


def test_refusal_ends_the_placement_there_only() -> None:
    open_requests = InFlight()
    open_requests.pick("r", "a", 0.0)
    open_requests.pick("r", "b", 0.1)
    open_requests.finish("r", "a", 0.2)
    assert (open_requests.count("a"), open_requests.count("b")) == (0, 1)


class InFlightMachine(RuleBasedStateMachine):
    """Counts and their history agree with a log of everything that happened."""

    requests = st.sampled_from([f"q{i}" for i in range(6)])
    replicas = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.open = InFlight(pick_timeout_s=1e9)
        self.model: dict[str, str] = {}
        self.unaccepted: dict[str, str] = {}
        self.ended: dict[str, str] = {}
        self.log: list[tuple[float, dict[str, str]]] = [(0.0, {})]

    def step(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def note(self) -> None:
        self.log.append((self.now_s, dict(self.model)))

    @rule(request=requests, replica=replicas, accepted=st.booleans())
    def place(self, request: str, replica: str, accepted: bool) -> None:
        place = self.open.accept if accepted else self.open.pick
        place(request, replica, self.step())
        if self.ended.pop(request, None) == replica and accepted:
            self.model.pop(request, None)
        else:
            self.model[request] = replica
            self.unaccepted.pop(request, None)
            if not accepted:
                self.unaccepted[request] = replica
        self.note()

    @rule(request=requests, replica=replicas)
    def finish(self, request: str, replica: str) -> None:
        self.open.finish(request, replica, self.step())
        if request not in self.model or request in self.unaccepted:
            self.ended[request] = replica
        if self.model.get(request) == replica:
            del self.model[request]
            self.unaccepted.pop(request, None)
        self.note()

    @rule(kept=st.sets(replicas))
    def retain(self, kept: set[str]) -> None:
        self.open.retain(kept)
        self.model = {q: r for q, r in self.model.items() if r in kept}
        # A dropped replica has no past either.
        self.log = [
            (at_s, {q: r for q, r in placed.items() if r in kept}) for at_s, placed in self.log
        ]

    @invariant()
    def counts_agree(self) -> None:
        for replica in "abc":
            now = sum(placed == replica for placed in self.model.values())
            assert self.open.count(replica) == now
            for at_s, placed in self.log[-5:]:
                then = sum(value == replica for value in placed.values())
                assert self.open.count_at(replica, at_s) == then


TestInFlightMachine = InFlightMachine.TestCase
TestInFlightMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
