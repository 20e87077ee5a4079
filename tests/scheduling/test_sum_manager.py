"""SUM manager: lending, modes, pins and the orders of a step, on a small replica."""

import pytest

from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.policy import SwitchLimits
from dps_ray.scheduling.retry import RetryLimits
from dps_ray.scheduling.states import LedgerError

from .replica import LIMITS, Replica, burst, calm


def test_burst_goes_fast_and_its_end_brings_full_mode_back_by_idle_steps():
    replica = Replica(LIMITS)
    assert replica.step().mode is Mode.FULL
    taken = replica.allocate(22)
    assert taken is not None
    command = replica.step()
    assert command.mode is Mode.FAST
    assert sorted(command.zero) == [0, 1, 2, 3]
    calm(replica, taken)
    assert replica.manager.has_pending_work
    tasks = replica.step().restore
    assert len(tasks) == 4
    replica.now_s += 3.0
    assert all(replica.finish(task) for task in tasks)
    assert replica.manager.has_pending_work
    assert replica.step().mode is Mode.FULL
    assert not replica.manager.has_pending_work
    counters = replica.manager.counters
    assert counters.last_restore_s == 3.0
    assert (counters.switches_to_fast, counters.switches_to_full) == (1, 1)
    assert (counters.units_lent, counters.restores_completed) == (4, 4)


def test_allocation_that_fits_base_lends_nothing():
    replica = Replica(LIMITS)
    burst(replica, 10)
    assert replica.manager.mode is Mode.FULL
    assert replica.manager.counters.units_lent == 0


def test_lend_that_cannot_serve_the_request_lends_nothing():
    replica = Replica(LIMITS)
    assert not replica.manager.lend_for(13)
    assert replica.ledger.fully_backed
    assert replica.step().zero == ()


def test_demand_alone_goes_fast_below_a_high_watermark_of_one_and_lends_nothing():
    replica = Replica(SwitchLimits(0.8, 0.6, 2.0, 0.0))
    taken = burst(replica, 8)
    assert replica.manager.mode is Mode.FAST
    assert replica.ledger.fully_backed
    replica.free(taken)
    assert replica.step().mode is Mode.FAST
    assert replica.manager.has_pending_work
    replica.now_s += 2.0
    assert replica.step().mode is Mode.FULL
    assert replica.manager.counters.last_restore_s is None


def test_full_dwell_withholds_lendable_blocks():
    replica = Replica(SwitchLimits(1.0, 0.6, 0.0, 5.0))
    calm(replica, burst(replica, 13))
    for task in replica.step().restore:
        replica.finish(task)
    assert replica.step().mode is Mode.FULL
    assert replica.manager.obtainable_blocks == 0
    replica.now_s += 5.0
    assert replica.manager.obtainable_blocks == 12


def test_fast_pin_serves_fast_lends_and_never_restores():
    replica = Replica(LIMITS, pin=Pin.FAST)
    assert replica.step().mode is Mode.FAST
    calm(replica, burst(replica))
    assert replica.step().restore == ()
    assert not replica.manager.has_pending_work
    assert replica.manager.counters.switches_to_fast == 0


def test_full_pin_lends_nothing_and_restores_under_any_demand():
    replica = Replica(LIMITS)
    taken = burst(replica, 16)
    replica.manager.set_pin(Pin.FULL)
    replica.free(taken[-3:])
    assert replica.manager.obtainable_blocks == 3
    (task,) = replica.step(waiting_requests=5).restore
    replica.finish(task)
    assert replica.allocate(1) is None
    assert replica.step().mode is Mode.FAST


def test_static_engine_follows_its_pin():
    for pin, mode in ((Pin.FULL, Mode.FULL), (Pin.FAST, Mode.FAST)):
        replica = Replica(LIMITS, units=0, pin=pin)
        assert replica.step().mode is mode
        assert replica.manager.obtainable_blocks == 0
        assert not replica.manager.has_pending_work


@pytest.mark.parametrize(
    ("zero", "sentence"),
    [([3, 3], "zeroed twice in one step"), ([0], "unit 0 would be zeroed although it holds")],
)
def test_integrity_check_names_a_wrong_order(zero, sentence):
    replica = Replica(LIMITS)
    burst(replica, 13)
    replica.manager.check_integrity()
    replica.manager._orders.zero = zero
    with pytest.raises(LedgerError, match=sentence):
        replica.manager.check_integrity()


def test_idle_replica_knows_how_long_it_has_to_wait():
    replica = Replica(LIMITS, retry=RetryLimits(first_pause_s=5.0))
    assert replica.manager.idle_pause_s == 0.0, "full mode: nothing to wait for"
    taken = burst(replica)
    assert replica.manager.idle_pause_s == 0.0, "live blocks: time alone changes nothing"
    replica.free(taken)
    replica.now_s += 0.5
    assert replica.manager.idle_pause_s == LIMITS.min_fast_dwell_s - 0.5
    assert replica.step().restore == ()
    replica.now_s += LIMITS.min_fast_dwell_s - 0.5
    assert replica.manager.idle_pause_s == 0.0
    first, *rest = replica.step().restore
    assert replica.manager.idle_pause_s == 0.0, "restores are open"
    replica.manager.on_restore_failed(first.unit, first.epoch, "no pinned memory")
    assert all(replica.finish(task) for task in rest)
    replica.step()
    assert replica.manager.idle_pause_s == 5.0


@pytest.mark.parametrize("pin", [Pin.AUTO, Pin.FULL])
def test_full_steps_have_one_command_until_a_unit_is_lent_or_the_pin_changes(pin):
    replica = Replica(LIMITS, pin=pin)
    command = replica.step()
    assert replica.step() is command
    replica.manager.set_pin(Pin.AUTO)
    assert replica.step() == command
    burst(replica)
    assert replica.manager.mode is Mode.FAST
    replica = Replica(LIMITS, pin=pin)
    replica.step()
    replica.step()
    replica.manager.set_pin(Pin.FAST)
    assert replica.step().mode is Mode.FAST


def test_demand_is_asked_at_every_full_step_below_a_high_watermark_of_one():
    replica = Replica(SwitchLimits(0.9, 0.6, 2.0, 0.0))
    replica.step()
    replica.step()
    assert replica.allocate(10) is not None
    assert replica.step().mode is Mode.FAST
