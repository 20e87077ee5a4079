"""A router's knowledge: publications, age, and its own requests on top."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dps_ray.fleet.in_flight import InFlight
from dps_ray.fleet.policies import PowerOfTwo
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.snapshot import Entry, FleetSnapshot, FreshnessOptions, Standing
from dps_ray.fleet.state import ReplicaState
from dps_ray.fleet.view import FleetView, Peer

from .builders import replica_state


def publication(*states: ReplicaState, version: int = 1, age_s: float = 0.0) -> Publication:
    entries = tuple(
        Entry(replica_id=state.replica_id, standing=Standing.LIVE, age_s=age_s, state=state)
        for state in states
    )
    return Publication(
        snapshot=FleetSnapshot(version=version, entries=entries),
        routing=PowerOfTwo(),
        freshness=FreshnessOptions(),
    )


def peers(*replica_ids: str) -> list[Peer]:
    return [Peer(replica_id, queue_len=None, hint=None) for replica_id in replica_ids]


def test_unheard_replica_is_a_cold_candidate() -> None:
    (only,) = FleetView().candidates(peers("new"), 0.0)
    assert only.entry.standing is Standing.COLD


def test_entries_age_on_the_routers_own_clock() -> None:
    view = FleetView()
    view.merge(publication(replica_state("a"), age_s=1.0), 10.0)
    (entry,) = view.candidates(peers("a"), 12.0)
    assert entry.entry.age_s == 3.0
    assert entry.entry.standing is Standing.LIVE
    (entry,) = view.candidates(peers("a"), 13.0)
    assert entry.entry.standing is Standing.STALE


def test_publication_of_a_restarted_controller_does_not_erase_what_is_known() -> None:
    view = FleetView()
    view.merge(publication(replica_state("a"), replica_state("b")), 10.0)
    view.merge(publication(replica_state("a", sequence=2), version=2), 11.0)
    standings = [c.entry.standing for c in view.candidates(peers("a", "b"), 11.5)]
    assert standings == [Standing.LIVE, Standing.LIVE]


def test_policy_comes_from_the_controller() -> None:
    view = FleetView()
    view.merge(publication(), 0.0)
    assert view.policy == PowerOfTwo()


def test_requests_placed_since_the_report_are_added_and_finished_ones_taken_off() -> None:
    view = FleetView()
    view.in_flight.pick("old", "a", 1.0)
    view.merge(publication(replica_state("a", running=1), age_s=0.5), 2.0)
    view.in_flight.pick("new", "a", 2.5)
    (now,) = view.candidates(peers("a"), 2.6)
    assert (now.placed_since, now.open_requests) == (1, 2)
    view.in_flight.finish("old", "a", 2.7)
    view.in_flight.finish("new", "a", 2.8)
    (now,) = view.candidates(peers("a"), 2.9)
    assert (now.placed_since, now.open_requests) == (-1, 0)


def test_burst_between_two_reports_is_spread_over_equal_replicas() -> None:
    view = FleetView()
    view.merge(publication(replica_state("a"), replica_state("b")), 0.0)
    rng = random.Random(0)
    for number in range(40):
        candidates = view.candidates(peers("a", "b"), 0.1 + number * 1e-4)
        choice = view.policy.decide(candidates, rng).order[0]
        view.in_flight.pick(str(number), choice, 0.1 + number * 1e-4)
    assert abs(view.in_flight.count("a") - view.in_flight.count("b")) <= 1


def test_pick_that_was_never_accepted_is_given_up() -> None:
    open_requests = InFlight(pick_timeout_s=5.0)
    open_requests.pick("left", "a", 0.0)
    open_requests.pick("served", "a", 0.0)
    open_requests.accept("served", "a", 0.1)
    open_requests.expire(5.1)
    assert open_requests.count("a") == 1


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
        self.model[request] = replica
        self.note()

    @rule(request=requests, replica=replicas)
    def finish(self, request: str, replica: str) -> None:
        self.open.finish(request, replica, self.step())
        if self.model.get(request) == replica:
            del self.model[request]
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
                assert self.open.added_since(replica, at_s) == now - then


TestInFlightMachine = InFlightMachine.TestCase
TestInFlightMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
