"""One report in, one answer out: table, leases and budget together."""

import pytest

from dps_ray.config import DpsConfigError
from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.fleet.coordinator import FIGURES_AGE_S, Coordinator
from dps_ray.fleet.leases import LeaseOptions, Refusal
from dps_ray.fleet.permits import ReplicaPermits
from dps_ray.fleet.publication import ControllerOptions, parse_controller_options
from dps_ray.fleet.routers import FORGET_AFTER_S
from dps_ray.fleet.snapshot import Standing
from dps_ray.fleet.state import Health
from dps_ray.fleet.table import Verdict
from dps_ray.fleet.tally import RouterReport
from dps_ray.modes import Pin

from .builders import replica_state
from .test_leases import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(clock: Clock) -> Coordinator:
    made = Coordinator(ControllerOptions(leases=LeaseOptions(max_concurrent=1)), clock)
    clock.now_s += made.options.leases.ttl_s
    return made


def test_second_wish_waits_for_the_first_restore_to_end(coordinator: Coordinator) -> None:
    assert coordinator.report(replica_state("a", 1, wants_restore=True)).lease
    reply = coordinator.report(replica_state("b", 1, wants_restore=True))
    assert (reply.lease, reply.refusal) == (False, Refusal.FULL)
    assert coordinator.refusals == {"b": Refusal.FULL}
    coordinator.report(replica_state("a", 2))
    assert coordinator.report(replica_state("b", 2, wants_restore=True)).lease
    assert coordinator.refusals == {}


def test_outdated_report_neither_takes_nor_gives_back_a_lease(coordinator: Coordinator) -> None:
    assert coordinator.report(replica_state("a", 5, wants_restore=True)).lease
    reply = coordinator.report(replica_state("a", 4, wants_restore=False))
    assert (reply.verdict, reply.lease) == (Verdict.OUTDATED, False)
    assert [lease.replica_id for lease in coordinator.book.leases()] == ["a"]


def test_lease_of_a_dead_replica_is_free_at_once(coordinator: Coordinator) -> None:
    assert coordinator.report(replica_state("a", 1, wants_restore=True)).lease
    coordinator.report(replica_state("a", 2, health=Health.DEAD, wants_restore=True))
    assert coordinator.report(replica_state("b", 1, wants_restore=True)).lease


def test_controller_that_loses_most_connections_is_blind_and_grants_nothing(
    coordinator: Coordinator, clock: Clock
) -> None:
    """The replicas may live, and restore on leases of their own."""
    for number in range(10):
        coordinator.report(replica_state(f"r{number}", 1))
    for number in range(7):
        coordinator.lose(f"r{number}")
    reply = coordinator.report(replica_state("r9", 2, wants_restore=True))
    assert (reply.lease, reply.refusal) == (False, Refusal.BLIND)
    for number in range(3):
        coordinator.report(replica_state(f"r{number}", 2))
    clock.now_s += 2 * FIGURES_AGE_S
    assert coordinator.report(replica_state("r9", 3, wants_restore=True)).lease


def test_replica_that_fell_silent_is_forgotten_everywhere(
    coordinator: Coordinator, clock: Clock
) -> None:
    coordinator.report(replica_state("b", 1, wants_restore=True))
    coordinator.report(replica_state("a", 1, wants_restore=True))
    clock.now_s += coordinator.options.ageing.forget_after_s + 1
    coordinator.tick()
    assert coordinator.aggregate.snapshot().entries == ()
    assert (coordinator.book.leases(), coordinator.refusals) == ([], {})


def test_new_terms_reach_replicas_with_their_next_answer(coordinator: Coordinator) -> None:
    coordinator.reconfigure(ControllerOptions(leases=LeaseOptions(enabled=False)))
    assert not coordinator.report(replica_state("a")).terms.enabled


def router(router_id: str, *offered: str, application: str | None = None) -> RouterReport:
    return RouterReport(
        router_id=router_id,
        application=application,
        node_id=None,
        policy="mode_aware",
        version=None,
        offered=offered,
    )


def standing(coordinator: Coordinator, replica_id: str) -> Standing:
    entries = {e.replica_id: e.standing for e in coordinator.aggregate.snapshot().entries}
    return entries[replica_id]


def test_replica_that_serve_no_longer_offers_is_draining_and_loses_its_lease(
    coordinator: Coordinator,
) -> None:
    coordinator.routers.note(router("r1", "a", "b"))
    coordinator.routers.note(router("r2", "a", "b"))
    assert coordinator.report(replica_state("a", 1, wants_restore=True)).lease
    coordinator.routers.note(router("r1", "b"))
    assert coordinator.report(replica_state("a", 2, wants_restore=True)).lease
    coordinator.routers.note(router("r2", "b"))
    reply = coordinator.report(replica_state("a", 3, wants_restore=True))
    assert (reply.lease, reply.refusal) == (False, Refusal.LEAVING)
    assert standing(coordinator, "a") is Standing.DRAINING


def test_routers_of_another_application_withdraw_nothing(coordinator: Coordinator) -> None:
    coordinator.routers.note(router("mine", "a", "b", application="llm"))
    coordinator.routers.note(router("theirs", "x", application="other"))
    coordinator.routers.note(router("mine", "b", application="llm"))
    coordinator.report(replica_state("a", 1, deployment="llm#model"))
    assert standing(coordinator, "a") is Standing.DRAINING
    coordinator.routers.note(router("mine", application="another"))
    coordinator.report(replica_state("b", 1, deployment="llm#model"))
    assert standing(coordinator, "b") is Standing.LIVE


def test_replica_that_no_router_knows_yet_is_not_taken_for_one_that_leaves(
    coordinator: Coordinator, clock: Clock
) -> None:
    coordinator.routers.note(router("r1", "a"))
    coordinator.report(replica_state("new", 1))
    assert standing(coordinator, "new") is Standing.LIVE
    clock.now_s += FORGET_AFTER_S + 1
    coordinator.report(replica_state("a", 1))
    assert standing(coordinator, "a") is Standing.LIVE


def test_pin_of_a_replica_beats_the_pin_of_all_others(coordinator: Coordinator) -> None:
    coordinator.reconfigure(ControllerOptions(pins={"a": Pin.FULL, "*": Pin.FAST}))
    pins = [coordinator.report(replica_state(name)).pin for name in "ab"]
    coordinator.reconfigure(ControllerOptions())
    pins.append(coordinator.report(replica_state("a", 2)).pin)
    assert pins == [Pin.FULL, Pin.FAST, None]


def test_replica_learns_the_operators_bounds_on_waiting(coordinator: Coordinator) -> None:
    coordinator.reconfigure(ControllerOptions(admission=AdmissionOptions(full_wait_s=1.5)))
    permits = ReplicaPermits("a", 0.0)
    permits.answered(coordinator.report(replica_state("a")), 0.0)
    assert permits.admission.full_wait_s == 1.5


def test_replica_ends_a_restore_whose_lease_was_taken_back_but_not_when_it_is_alone(
    coordinator: Coordinator, clock: Clock
) -> None:
    permits = ReplicaPermits("a", clock.now_s)
    permits.answered(coordinator.report(replica_state("a", 1, wants_restore=True)), clock.now_s)
    assert permits.has_lease(clock.now_s)
    assert not permits.must_stop_restores(clock.now_s)
    assert coordinator.book.revoke("a", 60.0)
    permits.answered(coordinator.report(replica_state("a", 2, restoring=True)), clock.now_s)
    assert permits.must_stop_restores(clock.now_s)
    assert not permits.has_lease(clock.now_s)
    clock.now_s += 2 * (coordinator.options.leases.alone_after_s or 0.0)
    assert not permits.must_stop_restores(clock.now_s)


def test_replica_that_waits_its_turn_is_not_told_to_stop(coordinator: Coordinator) -> None:
    coordinator.report(replica_state("a", 1, wants_restore=True))
    permits = ReplicaPermits("b", 0.0)
    permits.answered(coordinator.report(replica_state("b", 1, wants_restore=True)), 0.0)
    assert not permits.must_stop_restores(0.0)


def test_order_beats_the_configuration_and_what_names_a_replica_beats_all_others(
    coordinator: Coordinator,
) -> None:
    coordinator.reconfigure(ControllerOptions(pins={"a": Pin.FULL, "*": Pin.AUTO}))
    coordinator.orders = coordinator.orders.pinned("*", Pin.FAST, 5)
    assert [coordinator.report(replica_state(name)).pin for name in "ab"] == [Pin.FULL, Pin.FAST]
    coordinator.orders = coordinator.orders.pinned("a", Pin.AUTO, 6).pinned("*", None, 7)
    assert [coordinator.report(replica_state(name, 2)).pin for name in "ab"] == [Pin.AUTO, Pin.AUTO]


def test_new_controller_takes_the_latest_orders_over_from_replicas(
    coordinator: Coordinator, clock: Clock
) -> None:
    permits = {name: ReplicaPermits(name, clock.now_s) for name in "ab"}
    for revision, name in enumerate("ab", start=1):
        coordinator.orders = coordinator.orders.pinned("*", list(Pin)[revision], revision)
        permits[name].answered(coordinator.report(replica_state(name)), clock.now_s)
    successor = Coordinator(ControllerOptions(), clock)
    for name in "aba":
        state = replica_state(name, 2, orders=permits[name].orders)
        permits[name].answered(successor.report(state), clock.now_s)
    assert permits["b"].pin is list(Pin)[2]
    assert successor.orders == coordinator.orders
    assert successor.orders.pinned("x", Pin.FULL, 0).revision == 3


def test_orders_for_replicas_that_are_gone_are_dropped(
    coordinator: Coordinator, clock: Clock
) -> None:
    forget_after_s = coordinator.options.ageing.forget_after_s
    health = {"dead": Health.DEAD, "drained": Health.DRAINING, "withdrawn": Health.READY}
    for name in health:
        coordinator.orders = coordinator.orders.pinned(name, Pin.FULL, 1)
        coordinator.report(replica_state(name, health=health[name]))
    coordinator.orders = coordinator.orders.pinned("*", Pin.FAST, 2)
    coordinator.routers.note(router("r1", *health))
    clock.now_s += forget_after_s + 1
    coordinator.routers.note(router("r1"))
    coordinator.tick()
    assert coordinator.orders.pins == {"*": Pin.FAST}


def test_order_for_a_replica_that_was_cut_off_counts_when_it_returns(
    coordinator: Coordinator, clock: Clock
) -> None:
    coordinator.routers.note(router("r1", "a"))
    coordinator.orders = coordinator.orders.pinned("a", Pin.FULL, 1)
    carried = coordinator.report(replica_state("a")).orders
    clock.now_s += coordinator.options.ageing.forget_after_s + 1
    coordinator.routers.note(router("r1", "a"))
    coordinator.tick()
    assert coordinator.aggregate.snapshot().entries == ()
    assert coordinator.report(replica_state("a", 2, orders=carried)).pin is Pin.FULL


def test_new_controller_knows_the_orders_once_every_living_replica_was_heard(clock: Clock) -> None:
    coordinator = Coordinator(ControllerOptions(), clock)
    stale_after_s = coordinator.options.ageing.stale_after_s
    assert coordinator.orders_known_in_s() == stale_after_s
    clock.now_s += stale_after_s
    assert coordinator.orders_known_in_s() == 0.0


def test_lease_must_outlive_the_silence_after_which_its_holder_is_stale() -> None:
    with pytest.raises(DpsConfigError, match=r"leases\.ttl_s \(3\.0\) must be above"):
        parse_controller_options({"leases": {"ttl_s": 3.0}})
