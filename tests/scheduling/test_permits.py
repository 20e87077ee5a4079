"""What fleet and requests allow a replica: restores, leaving full mode, staying in it."""

from hypothesis import given
from hypothesis import strategies as st

from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.permits import Permits
from dps_ray.scheduling.policy import SwitchLimits

from .replica import LIMITS, Replica, burst, calm

ALL_BLOCKS = 22
BASE_BLOCKS = 10


def lent_replica() -> Replica:
    """A replica that has lent everything and wants it back."""
    replica = Replica(LIMITS)
    calm(replica, burst(replica))
    return replica


def test_restore_waits_for_the_permit_and_the_wish_shows() -> None:
    replica = lent_replica()
    replica.manager.set_permits(Permits(restore=False))
    assert replica.step().restore == ()
    assert replica.manager.wants_restore
    assert replica.manager.awaits_permit
    assert replica.manager.has_pending_work
    replica.manager.set_permits(Permits(restore=True))
    assert len(replica.step().restore) == 4
    assert not replica.manager.awaits_permit


def test_open_restores_run_on_after_the_permit_ends() -> None:
    replica = lent_replica()
    tasks = replica.step().restore
    replica.manager.set_permits(Permits(restore=False))
    assert replica.step().cancel == ()
    assert all(replica.finish(task) for task in tasks)
    assert replica.step().mode is Mode.FULL


def test_stopped_restores_give_their_units_back_zeroed_and_begin_again_later() -> None:
    replica = lent_replica()
    tasks = replica.step().restore
    assert replica.finish(tasks[0])
    replica.manager.set_permits(Permits(restore=False, stop=True))
    assert replica.manager.obtainable_blocks >= 3 * replica.manager.ledger.blocks_per_unit
    command = replica.step()
    assert command.cancel == tasks[1:]
    assert set(command.zero) == {task.unit for task in tasks[1:]}
    assert command.mode is Mode.FAST
    assert replica.manager.wants_restore is False
    assert replica.step().restore == ()
    assert replica.manager.wants_restore
    assert not replica.finish(tasks[1])
    replica.manager.set_permits(Permits())
    again = replica.step().restore
    assert len(again) == 3
    assert all(replica.finish(task) for task in again)
    assert replica.step().mode is Mode.FULL


def test_replica_under_demand_does_not_wish_to_restore() -> None:
    replica = lent_replica()
    replica.manager.set_permits(Permits(restore=False))
    replica.step(waiting_requests=1, waiting_blocks=BASE_BLOCKS)
    assert not replica.manager.wants_restore


def test_replica_that_may_not_go_fast_lends_nothing_and_stays() -> None:
    replica = Replica(SwitchLimits(0.8, 0.6, 2.0, 0.0))
    replica.manager.set_permits(Permits(fast=False))
    assert replica.allocate(BASE_BLOCKS + 1) is None
    assert replica.allocate(BASE_BLOCKS) is not None
    assert replica.step().mode is Mode.FULL


def test_replica_in_fast_mode_lends_on_without_the_permit_to_go_there() -> None:
    replica = Replica(LIMITS)
    assert replica.allocate(BASE_BLOCKS + 1) is not None
    assert replica.step().mode is Mode.FAST
    replica.manager.set_permits(Permits(fast=False))
    assert replica.allocate(5) is not None


def test_pin_to_fast_overrules_the_fleet_but_not_requests_that_insist() -> None:
    replica = Replica(LIMITS)
    replica.manager.set_pin(Pin.FAST)
    replica.manager.set_permits(Permits(fast=False, hold_full=True))
    assert replica.step().mode is Mode.FULL
    replica.manager.set_permits(Permits(fast=False))
    assert replica.step().mode is Mode.FAST


permits = st.builds(
    Permits, **dict.fromkeys(("restore", "stop", "fast", "hold_full"), st.booleans())
)


@given(st.lists(st.tuples(permits, st.integers(0, ALL_BLOCKS), st.sampled_from(Pin))))
def test_replica_never_leaves_full_mode_under_requests_that_insist(
    steps: list[tuple[Permits, int, Pin]],
) -> None:
    replica = Replica(LIMITS)
    mode, open_blocks = Mode.FULL, []
    for allowed, blocks, pin in steps:
        replica.manager.set_pin(pin)
        replica.manager.set_permits(allowed)
        replica.now_s += 1.0
        taken = replica.allocate(blocks)
        if taken is None:
            for each in open_blocks:
                replica.free(each)
            open_blocks.clear()
        else:
            open_blocks.append(taken)
        command = replica.step()
        if mode is Mode.FULL and allowed.hold_full:
            assert command.mode is Mode.FULL
            assert command.zero == ()
        if allowed.stop or not allowed.restore:
            assert command.restore == ()
        if allowed.stop:
            assert replica.manager.ledger.open_restores == ()
        mode = command.mode
        # The others stay open, for a stop to end them.
        for task in command.restore[::2]:
            replica.finish(task)
        replica.manager.check_integrity()
