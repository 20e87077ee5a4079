"""Restore leases: never more than allowed, through lost messages, silence and crashes."""

from typing import Any

import pytest

from dps_ray.fleet.figures import FleetFigures
from dps_ray.fleet.lease_holder import LeaseHolder
from dps_ray.fleet.leases import LeaseBook, LeaseOptions, Refusal
from dps_ray.fleet.snapshot import Entry, FreshnessOptions, classify
from dps_ray.fleet.state import Health, ReplicaState

from .builders import replica_state

TTL_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def figures(**changes: Any) -> FleetFigures:
    return FleetFigures(
        **{"live": 8, "present": 8, "headroom_blocks": 500, "total_blocks": 800, **changes}
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> LeaseBook:
    """A book that has seen the fleet for long enough."""
    made = LeaseBook(LeaseOptions(ttl_s=TTL_S, max_concurrent=2, max_per_node=1), clock)
    clock.now_s += TTL_S
    return made


def wish(replica_id: str, node_id: str | None = None, **changes: Any) -> ReplicaState:
    return replica_state(replica_id, node_id=node_id, **{"wants_restore": True, **changes})


def ask(book: LeaseBook, state: ReplicaState, **changes: Any) -> bool | Refusal:
    return book.answer(state, lambda: figures(**changes))


def test_leases_go_to_the_oldest_wishes_and_no_further(book: LeaseBook, clock: Clock) -> None:
    answers = []
    for replica_id in "abc":
        clock.now_s += 0.1
        answers.append(ask(book, wish(replica_id)))
    assert answers == [True, True, Refusal.FULL]


def test_lease_that_ends_goes_to_whoever_has_waited_longest(book: LeaseBook, clock: Clock) -> None:
    for replica_id in "abcd":
        clock.now_s += 0.1
        ask(book, wish(replica_id))
    assert ask(book, replica_state("a", wants_restore=False)) is False
    assert ask(book, wish("d")) is Refusal.FULL
    assert ask(book, wish("c")) is True


def test_node_limit_holds_where_the_fleet_has_leases_left(book: LeaseBook) -> None:
    assert ask(book, wish("a", node_id="n1")) is True
    assert ask(book, wish("b", node_id="n1")) is Refusal.NODE
    assert ask(book, wish("c", node_id="n2")) is True


def test_reports_renew_a_lease_and_silence_ends_it(book: LeaseBook, clock: Clock) -> None:
    assert ask(book, wish("a")) is True
    clock.now_s += TTL_S - 1
    assert ask(book, wish("a", restoring=True)) is True
    clock.now_s += TTL_S - 1
    assert [lease.replica_id for lease in book.leases()] == ["a"]
    clock.now_s += 1
    assert book.leases() == []


@pytest.mark.parametrize("health", [Health.DRAINING, Health.DEAD, Health.STARTING])
def test_replica_that_is_leaving_gets_no_lease_and_loses_its_own(
    book: LeaseBook, health: Health
) -> None:
    assert ask(book, wish("a")) is True
    assert ask(book, wish("a", health=health)) is Refusal.LEAVING
    assert book.leases() == []


def test_revoked_lease_keeps_its_place_until_it_would_have_run_out(
    book: LeaseBook, clock: Clock
) -> None:
    assert ask(book, wish("a", node_id="n1")) is True
    ask(book, wish("a", node_id="n1", health=Health.DRAINING))
    assert ask(book, wish("b", node_id="n1")) is Refusal.NODE
    clock.now_s += TTL_S
    assert ask(book, wish("b", node_id="n1")) is True


def test_replica_that_is_leaving_does_not_hold_up_younger_wishes(
    book: LeaseBook, clock: Clock
) -> None:
    for replica_id in "abc":
        clock.now_s += 0.1
        assert ask(book, wish(replica_id, health=Health.DRAINING)) is Refusal.LEAVING
    clock.now_s += 0.1
    assert ask(book, wish("d")) is True


def test_wishes_of_a_full_node_do_not_hold_up_other_nodes(book: LeaseBook, clock: Clock) -> None:
    answers = []
    for replica_id, node_id in [("a", "n1"), ("b", "n1"), ("c", "n1"), ("d", "n2")]:
        clock.now_s += 0.1
        answers.append(ask(book, wish(replica_id, node_id=node_id)))
    assert answers == [True, Refusal.NODE, Refusal.NODE, True]


def test_pressure_revokes_leases_and_grants_none(book: LeaseBook) -> None:
    assert ask(book, wish("a")) is True
    assert ask(book, wish("a"), headroom_blocks=10) is Refusal.PRESSURE
    assert ask(book, wish("b"), headroom_blocks=10) is Refusal.PRESSURE
    assert (book.leases(), book.revoked) == ([], 1)


def test_lease_that_pressure_took_comes_back_only_when_it_would_have_run_out(
    book: LeaseBook, clock: Clock
) -> None:
    assert ask(book, wish("a")) is True
    assert ask(book, wish("a", restoring=True), headroom_blocks=10) is Refusal.PRESSURE
    clock.now_s += TTL_S / 2
    assert ask(book, wish("a")) is Refusal.REVOKED
    assert ask(book, wish("b")) is True, "younger wishes do not wait for one that is barred"
    clock.now_s += TTL_S / 2
    assert ask(book, wish("a")) is True


def test_headroom_of_the_replica_that_asks_is_no_headroom_of_the_others(book: LeaseBook) -> None:
    strained = {"headroom_blocks": 110, "total_blocks": 800, "parts": {"a": (100, 100)}}
    assert ask(book, wish("a"), **strained) is Refusal.PRESSURE
    assert ask(book, wish("b"), **strained) is True
    alone = {"headroom_blocks": 0, "total_blocks": 100, "parts": {"a": (0, 100)}}
    assert ask(book, wish("a"), **alone) is True


def test_operator_takes_a_lease_back_for_as_long_as_he_says(book: LeaseBook, clock: Clock) -> None:
    assert book.revoke("a", 30.0) is False
    assert ask(book, wish("a", node_id="n1")) is True
    assert book.revoke("a", 30.0) is True
    assert ask(book, wish("b", node_id="n1")) is Refusal.NODE, "its holder may not have heard yet"
    clock.now_s += 29.0
    assert ask(book, wish("a", restoring=True)) is Refusal.REVOKED
    clock.now_s += 1.0
    assert ask(book, wish("a")) is True


def test_operator_bars_a_replica_until_it_has_heard_of_it_however_short_the_time(
    book: LeaseBook, clock: Clock
) -> None:
    assert ask(book, wish("a")) is True
    assert book.revoke("a", 0.0) is True
    clock.now_s += 1.0
    assert ask(book, wish("a", restoring=True)) is Refusal.REVOKED
    assert ask(book, wish("a")) is True


def test_operator_ends_a_restore_that_was_begun_without_a_lease(
    book: LeaseBook, clock: Clock
) -> None:
    assert ask(book, wish("a")) is True
    assert ask(book, wish("b")) is True
    assert ask(book, wish("alone", restoring=True)) is Refusal.FULL
    assert book.revoke("alone", 5.0) is True
    ask(book, replica_state("a", wants_restore=False))
    assert ask(book, wish("alone", restoring=True)) is Refusal.REVOKED


@pytest.mark.parametrize("refusal", Refusal)
def test_only_a_lease_that_was_taken_back_ends_a_restore_that_runs(refusal: Refusal) -> None:
    assert refusal.stops == (refusal in (Refusal.PRESSURE, Refusal.LEAVING, Refusal.REVOKED))


def test_new_book_grants_nothing_for_one_lease_time_but_knows_valid_leases(clock: Clock) -> None:
    book = LeaseBook(LeaseOptions(ttl_s=TTL_S), clock)
    assert ask(book, wish("new")) is Refusal.BLIND
    assert ask(book, wish("holder", has_lease=True)) is True
    clock.now_s += TTL_S - 0.1
    assert ask(book, wish("new")) is Refusal.BLIND


def test_book_that_sees_too_little_of_the_fleet_grants_nothing(book: LeaseBook) -> None:
    assert ask(book, wish("a"), live=3) is Refusal.BLIND
    assert ask(book, wish("a"), live=4) is True


def test_restore_without_a_lease_takes_one_away_from_the_others(book: LeaseBook) -> None:
    assert ask(book, wish("a")) is True
    assert ask(book, wish("b")) is True
    assert ask(book, wish("alone", restoring=True)) is Refusal.FULL
    ask(book, replica_state("a", wants_restore=False))
    assert ask(book, wish("c")) is Refusal.FULL
    ask(book, replica_state("alone", wants_restore=False))
    assert ask(book, wish("c")) is True


def test_default_limit_is_a_share_of_the_live_replicas_and_at_least_one(clock: Clock) -> None:
    book = LeaseBook(LeaseOptions(ttl_s=TTL_S, max_share=0.25), clock)
    clock.now_s += TTL_S
    answers = [ask(book, wish(str(number)), live=9) for number in range(4)]
    assert answers == [True, True, Refusal.FULL, Refusal.FULL]
    lonely = LeaseBook(LeaseOptions(ttl_s=TTL_S), clock)
    clock.now_s += TTL_S
    assert ask(lonely, wish("a"), live=1, present=1) is True


def test_holder_may_restore_for_the_life_of_its_lease_from_the_sending_of_the_report() -> None:
    terms = LeaseOptions(ttl_s=TTL_S, alone_after_s=None)
    holder = LeaseHolder("a", terms, 0.0)
    assert holder.restore_until_s(1.0) == 0.0
    holder.answered(terms, granted=True, sent_at_s=5.0)
    assert holder.restore_until_s(6.0) == 15.0
    assert holder.has_lease(14.9)
    assert not holder.has_lease(15.0)


def test_holders_without_a_controller_go_alone_one_after_the_other() -> None:
    terms = LeaseOptions(ttl_s=TTL_S, alone_after_s=60.0)
    holders = [LeaseHolder(f"r{number}", terms, 0.0) for number in range(50)]
    alone = [
        sum(holder.restore_until_s(now_s) is None for holder in holders)
        for now_s in (59.0, 70.0, 90.0, 120.0)
    ]
    assert alone[0] == 0
    assert alone == sorted(alone)
    assert 0 < alone[1] < alone[2] < alone[3] == 50
    holders[0].answered(terms, granted=False, sent_at_s=120.0)
    assert holders[0].restore_until_s(121.0) == 0.0


def test_holder_never_goes_alone_where_the_operator_says_so() -> None:
    holder = LeaseHolder("a", LeaseOptions(alone_after_s=None), 0.0)
    assert holder.restore_until_s(1e9) == 0.0


def test_disabled_leases_allow_restores_at_any_time() -> None:
    holder = LeaseHolder("a", LeaseOptions(), 0.0)
    holder.answered(LeaseOptions(enabled=False), granted=False, sent_at_s=1.0)
    assert holder.restore_until_s(1.0) is None


def test_fleet_figures_leave_out_replicas_that_cannot_help() -> None:
    def entry(name: str, age_s: float = 0.0, **changes: Any) -> Entry:
        state = replica_state(name, **changes)
        standing = classify(state, age_s, FreshnessOptions())
        return Entry(replica_id=name, standing=standing, age_s=age_s, state=state)

    entries = [
        entry("well", headroom_blocks=70),
        entry("restoring", restoring=True),
        entry("unknown", headroom_blocks=None),
        entry("stale", age_s=10.0),
        entry("dead", health=Health.DEAD),
    ]
    assert FleetFigures.of(entries) == FleetFigures(3, 4, 70, 100, {"well": (70, 100)})
