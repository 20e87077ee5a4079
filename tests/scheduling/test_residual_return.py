"""The residual's way back: which restores begin, stand still, go on, fail, on a small replica."""

from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.permits import Permits
from dps_ray.scheduling.retry import RetryLimits

from .replica import LIMITS, Replica, burst, calm


def test_small_burst_holds_the_other_restores_until_pressure_falls_again():
    replica = Replica(LIMITS)
    calm(replica, burst(replica))
    first, *rest = replica.step().restore
    taken = replica.allocate(11)
    assert taken is not None
    command = replica.step()
    assert (len(command.cancel), command.hold) == (1, True)
    assert not replica.manager.restoring
    assert replica.finish(first), "what had arrived by then counts"
    replica.free(taken)
    assert replica.manager.has_pending_work
    assert replica.manager.idle_pause_s == LIMITS.min_fast_dwell_s
    assert replica.step().hold
    replica.now_s += LIMITS.min_fast_dwell_s
    command = replica.step()
    assert not command.hold
    assert [task.unit for task in command.restore] == [rest[-1].unit], "only the stolen one anew"
    began_s = replica.now_s
    replica.now_s += 4.0
    assert all(replica.finish(task) for task in (*rest[:-1], *command.restore))
    assert replica.step().mode is Mode.FULL
    assert replica.manager.counters.last_restore_s == replica.now_s - began_s


def test_time_left_follows_the_pace_and_is_unknown_while_nothing_shows_it():
    replica = Replica(LIMITS)
    left = lambda: replica.manager.restore_left_s  # noqa: E731
    assert left() is None
    calm(replica, burst(replica))
    first, second, *_ = replica.step().restore
    assert left() is None, "no segment has come back"
    replica.now_s += 2.0
    replica.finish(first)
    assert left() == 6.0
    replica.now_s += 1.0
    replica.finish(second)
    assert left() == 3.0
    taken = replica.allocate(11)
    assert taken is not None
    replica.step()
    assert left() is None, "a burst holds the rest"
    calm(replica, taken)
    *_, last = sorted(replica.ledger.open_restores, key=lambda task: task.epoch)
    replica.step()
    assert left() is None, "the pace of before the burst says nothing"
    replica.now_s += 5.0
    replica.finish(last)
    assert left() == 5.0


def test_time_left_does_not_count_a_pause_between_restores():
    replica = Replica(LIMITS)
    calm(replica, burst(replica))
    first, *rest = replica.step().restore
    for task in (first, *rest[:-1]):
        replica.now_s += 1.0
        replica.finish(task)
    replica.manager.on_restore_failed(rest[-1].unit, rest[-1].epoch, "broken link")
    replica.step()
    replica.now_s += 600.0
    replica.step()
    assert replica.manager.restoring
    assert replica.manager.restore_left_s is None, "nothing has come back since the pause"


def test_held_restores_go_on_only_with_a_permit_and_not_under_a_fast_pin():
    replica = Replica(LIMITS)
    calm(replica, burst(replica))
    replica.step()
    calm(replica, burst(replica, 11))
    replica.manager.set_permits(Permits(restore=False))
    assert replica.step().hold
    assert replica.manager.awaits_permit
    replica.manager.set_pin(Pin.FAST)
    replica.manager.set_permits(Permits())
    assert replica.step().hold
    assert not replica.manager.has_pending_work
    replica.manager.set_pin(Pin.FULL)
    assert not replica.step().hold


def test_new_burst_takes_restoring_units_and_cancels_their_restores():
    replica = Replica(LIMITS)
    calm(replica, burst(replica))
    tasks = replica.step().restore
    assert replica.finish(tasks[0])
    assert replica.allocate(10 + 3) is not None
    command = replica.step()
    assert command.cancel == (tasks[-1],)
    assert command.zero == (tasks[-1].unit,)
    assert not replica.manager.on_restored(tasks[-1].unit, tasks[-1].epoch)
    assert replica.manager.counters.restores_cancelled == 1


def test_last_restore_time_starts_anew_after_a_lend():
    replica = Replica(LIMITS)
    calm(replica, burst(replica))
    first = replica.step().restore
    replica.now_s += 5.0
    calm(replica, burst(replica, 13))
    second = replica.step().restore
    replica.now_s += 1.0
    for task in (*first, *second):
        replica.finish(task)
    replica.step()
    assert replica.manager.counters.last_restore_s == 1.0


def test_restores_wait_for_the_dwell_but_keep_an_idle_engine_stepping():
    replica = Replica(LIMITS)
    replica.free(burst(replica))
    assert replica.step().restore == ()
    assert replica.manager.has_pending_work


def test_the_longest_free_unit_is_restored_first():
    replica = Replica(LIMITS)
    taken = burst(replica)
    replica.free(taken[::-1])
    freed = replica.ledger.restorable_units()
    replica.now_s += 2.0
    assert tuple(task.unit for task in replica.step().restore) == freed


def test_unit_zeroed_in_a_step_is_restored_in_a_later_one():
    replica = Replica(LIMITS, pin=Pin.AUTO)
    taken = replica.allocate(13)
    assert taken is not None
    replica.free(taken)
    replica.manager.set_pin(Pin.FULL)
    command = replica.step()
    assert (command.zero, command.restore) == ((3,), ())
    assert [task.unit for task in replica.step().restore] == [3]


def test_failed_restore_is_cancelled_zeroed_and_tried_again_after_a_pause():
    replica = Replica(LIMITS, units=1, retry=RetryLimits(attempts=3, first_pause_s=1.0))
    calm(replica, burst(replica, 13))
    (task,) = replica.step().restore
    assert replica.manager.on_restore_failed(task.unit, task.epoch, "checksum differs")
    assert replica.manager.fault == (
        "restore of residual segment 0 failed; retrying (checksum differs)"
    )
    command = replica.step()
    assert (command.mode, command.cancel, command.zero) == (Mode.FAST, (task,), (0,))
    replica.now_s += 0.9
    assert replica.step().restore == ()
    assert replica.manager.has_pending_work
    replica.now_s += 0.2
    (again,) = replica.step().restore
    assert replica.finish(again)
    assert replica.manager.fault is None
    assert replica.step().mode is Mode.FULL


def test_manager_gives_up_after_the_last_attempt_until_the_pin_changes():
    replica = Replica(LIMITS, units=1, retry=RetryLimits(attempts=2, first_pause_s=1.0))
    calm(replica, burst(replica, 13))
    for pause_s in (1.0, 60.0):
        (task,) = replica.step().restore
        replica.manager.on_restore_failed(task.unit, task.epoch, "no pinned memory")
        replica.step()
        replica.now_s += pause_s
    assert replica.step().restore == ()
    assert not replica.manager.has_pending_work
    assert "gave up after 2 attempts: change the pin" in (replica.manager.fault or "")
    calm(replica, burst(replica, 13))
    assert replica.step().restore == (), "the unit still serves the KV cache, and only that"
    replica.manager.set_pin(Pin.FULL)
    assert replica.manager.fault is None
    assert replica.manager.has_pending_work
    assert len(replica.step().restore) == 1
