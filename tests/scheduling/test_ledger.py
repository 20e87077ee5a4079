"""Unit ledger: Algorithm 1's transitions, both bindings, refused orders, and speed."""

import random
import time

import pytest

from dps_ray.commands import RestoreTask
from dps_ray.modes import Mode
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.ledger_integrity import check_ledger
from dps_ray.scheduling.states import LedgerError, SegmentState, UnitState


def lend_all(ledger: UnitLedger) -> None:
    while ledger.lend() is not None:
        pass


def test_new_ledger_is_fully_backed_and_has_nothing_free():
    ledger = UnitLedger(3, 4)
    assert ledger.mode_allowed() is Mode.FULL
    assert ledger.restore_progress == 1.0
    assert (ledger.kv_free_blocks, ledger.lendable_blocks) == (0, 12)
    assert ledger.pick_unit() is None
    assert [ledger.segment_of(unit) for unit in range(3)] == [0, 1, 2]


def test_ledger_without_units_stays_in_full_mode_and_lends_nothing():
    ledger = UnitLedger(0, 4)
    assert ledger.lend() is None
    assert ledger.mode_allowed() is Mode.FULL
    assert ledger.restore_progress == 1.0


def test_lent_unit_passes_through_avail_and_full_and_back_to_free():
    ledger = UnitLedger(1, 2)
    lend = ledger.lend()
    assert lend is not None
    assert (lend.unit, lend.segment, lend.cancelled) == (0, 0, None)
    assert ledger.segment_state(0) is SegmentState.STALE
    seen = [ledger.state(0)]
    for order in (ledger.allocate, ledger.allocate, ledger.release, ledger.release):
        order(0)
        seen.append(ledger.state(0))
    assert seen == [
        UnitState.FREE,
        UnitState.AVAIL,
        UnitState.FULL,
        UnitState.AVAIL,
        UnitState.FREE,
    ]


def test_fullest_unit_is_picked_before_emptier_and_free_ones():
    ledger = UnitLedger(3, 4)
    lend_all(ledger)
    ledger.allocate(0, 1)
    ledger.allocate(1, 3)
    assert ledger.pick_unit() == 1
    ledger.allocate(1, 1)
    assert ledger.pick_unit() == 0


def test_longest_free_unit_is_picked_and_restored_first():
    ledger = UnitLedger(3, 1)
    lend_all(ledger)
    for unit in range(3):
        ledger.allocate(unit)
    for unit in (1, 0, 2):
        ledger.release(unit)
    assert ledger.restorable_units() == (1, 0, 2)
    assert ledger.pick_unit() == 1


def test_lend_takes_the_latest_restore_before_any_backed_unit():
    ledger = UnitLedger(3, 1)
    for _ in range(2):
        ledger.lend()
    tasks = [ledger.begin_restore(unit) for unit in ledger.restorable_units()]
    lends = [ledger.lend() for _ in range(3)]
    assert [lend.cancelled for lend in lends if lend] == [tasks[1], tasks[0], None]
    assert ledger.segment_state(tasks[0].segment) is SegmentState.STALE
    assert ledger.lend() is None


def test_segment_is_evicted_from_the_choice_of_its_restore_until_success():
    ledger = UnitLedger(1, 1)
    ledger.lend()
    first = ledger.begin_restore(0)
    assert ledger.segment_state(0) is SegmentState.EVICTED
    assert ledger.abandon_restore(first)
    assert ledger.state(0) is UnitState.FREE
    assert ledger.segment_state(0) is SegmentState.EVICTED
    second = ledger.begin_restore(0)
    assert second.epoch > first.epoch
    assert not ledger.complete_restore(first)
    assert not ledger.abandon_restore(first)
    assert ledger.complete_restore(second)
    assert ledger.segment_state(0) is SegmentState.BOUND


def test_any_binding_restores_the_longest_waiting_segment_into_whichever_unit_is_free():
    ledger = UnitLedger(3, 1, binding="any")
    lost = [lend.segment for _ in range(3) if (lend := ledger.lend())]
    ledger.allocate(lost[0])
    units = ledger.restorable_units()
    tasks = [ledger.begin_restore(unit) for unit in units]
    assert [task.segment for task in tasks] == lost[:2]
    assert ledger.segment_of(units[0]) == lost[0] != units[0]


def test_any_binding_tries_other_segments_before_one_that_failed():
    ledger = UnitLedger(2, 1, binding="any")
    lend_all(ledger)
    failed = ledger.begin_restore(0)
    ledger.abandon_restore(failed)
    assert ledger.begin_restore(0).segment != failed.segment


def test_fixed_binding_restores_each_unit_its_own_segment():
    ledger = UnitLedger(3, 1)
    lend_all(ledger)
    assert [ledger.begin_restore(unit).segment for unit in (2, 0, 1)] == [2, 0, 1]


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (lambda ledger: ledger.allocate(0), "unit 0 is backed: lend it before allocating"),
        (lambda ledger: ledger.allocate(2, 3), "cannot allocate 3 blocks in unit 2: 1 are free"),
        (lambda ledger: ledger.release(2, 2), "cannot release 2 blocks in unit 2: 1 are live"),
        (lambda ledger: ledger.release(0), "cannot release 1 blocks in unit 0: 0 are live"),
        (lambda ledger: ledger.begin_restore(2), "unit 2 is avail: only a free unit"),
        (lambda ledger: ledger.begin_restore(1), "unit 1 is backed: only a free unit"),
    ],
)
def test_impossible_order_is_refused_and_changes_nothing(order, sentence):
    ledger = UnitLedger(3, 2)
    ledger.lend()
    ledger.allocate(2)
    with pytest.raises(LedgerError, match=sentence):
        order(ledger)
    check_ledger(ledger)
    assert [ledger.state(unit) for unit in range(3)] == [
        UnitState.BACKED,
        UnitState.BACKED,
        UnitState.AVAIL,
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [((-1, 4), "num_units is -1: give 0"), ((4, 0), "blocks_per_unit is 0: a unit holds 1")],
)
def test_impossible_size_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        UnitLedger(*arguments)


def _two_units_hold_one_segment(ledger: UnitLedger) -> None:
    ledger.binding = "any"
    ledger._segment[0] = 1


def _live_block_under_a_segment(ledger: UnitLedger) -> None:
    ledger._used[0] = 1


def _free_blocks_miscounted(ledger: UnitLedger) -> None:
    ledger._kv_free_blocks += 1


def _lendable_blocks_miscounted(ledger: UnitLedger) -> None:
    ledger._lendable_blocks -= 1


def _unit_listed_under_another_state(ledger: UnitLedger) -> None:
    ledger._state[2] = UnitState.FULL


def _stale_segment_in_a_backed_unit(ledger: UnitLedger) -> None:
    ledger._segment_state[0] = SegmentState.STALE


def _restore_of_another_segment(ledger: UnitLedger) -> None:
    ledger._restoring[0] = RestoreTask(0, 1, 1)


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        (_two_units_hold_one_segment, "a segment stands in two units"),
        (_live_block_under_a_segment, "unit 0 holds segment 0 and 1 live blocks"),
        (_free_blocks_miscounted, "3 free blocks are counted, 2 exist"),
        (_lendable_blocks_miscounted, "lendable blocks are counted, not"),
        (_unit_listed_under_another_state, "unit 2 is full with 0 live blocks"),
        (_stale_segment_in_a_backed_unit, "segment 0 is stale"),
        (_restore_of_another_segment, "unit 0 restores RestoreTask"),
    ],
)
def test_integrity_check_names_what_is_broken(breakage, sentence):
    ledger = UnitLedger(3, 2)
    ledger.lend()
    check_ledger(ledger)
    breakage(ledger)
    with pytest.raises(LedgerError, match=sentence):
        check_ledger(ledger)


def test_hundred_thousand_operations_on_256_units_take_seconds_at_most():
    dice = random.Random(7)
    ledger = UnitLedger(256, 16, binding="any")
    live: list[int] = []
    began_s = time.thread_time()
    for _ in range(100_000):
        chance = dice.random()
        if chance < 0.47:
            unit = ledger.pick_unit()
            if unit is None:
                lend = ledger.lend()
                unit = lend.unit if lend else None
            if unit is not None:
                ledger.allocate(unit)
                live.append(unit)
        elif chance < 0.94 and live:
            index = dice.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            ledger.release(live.pop())
        elif chance < 0.97 and ledger.count(UnitState.FREE):
            ledger.begin_restore(ledger.restorable_units()[0])
        elif ledger.count(UnitState.RESTORING):
            ledger.complete_restore(ledger.open_restores[0])
    elapsed_s = time.thread_time() - began_s
    check_ledger(ledger)
    assert elapsed_s < 5.0
