"""The invariants of the unit ledger, each with the sentence that says how it is broken."""

from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.states import LedgerError, SegmentState, UnitState


def check_ledger(ledger: UnitLedger) -> None:
    """Verify every invariant in linear time.

    Raises
    ------
    LedgerError
        A sentence that names the unit or segment and what is wrong with it.
    """
    for unit in range(ledger.num_units):
        _check_unit(ledger, unit)
    held = [segment for segment in ledger._segment if segment is not None]
    if len(set(held)) != len(held):
        raise LedgerError(f"a segment stands in two units: {sorted(held)}")
    if set(held) & set(ledger._waiting) or len(held) + len(ledger._waiting) != ledger.num_units:
        raise LedgerError("the segments in units and the waiting ones are not all the segments")
    bound = {segment for unit in ledger._backed if (segment := ledger._segment[unit]) is not None}
    for segment, state in enumerate(ledger._segment_state):
        if (state is SegmentState.BOUND) != (segment in bound):
            raise LedgerError(f"segment {segment} is {state}, which its unit contradicts")
    if sum(ledger.count(state) for state in UnitState) != ledger.num_units:
        raise LedgerError("the units counted by state are not all the units")
    kv_free = sum(ledger.free_blocks(unit) for unit in range(ledger.num_units))
    if kv_free != ledger._kv_free_blocks:
        raise LedgerError(f"{ledger._kv_free_blocks} free blocks are counted, {kv_free} exist")
    lendable = (len(ledger._backed) + len(ledger._restoring)) * ledger.blocks_per_unit
    if lendable != ledger._lendable_blocks:
        raise LedgerError(f"{ledger._lendable_blocks} lendable blocks are counted, not {lendable}")
    epochs = [task.epoch for task in ledger._restoring.values()]
    if epochs != sorted(set(epochs)) or (epochs and epochs[-1] > ledger._last_epoch):
        raise LedgerError(f"epochs of open restores do not grow: {epochs}")


def _check_unit(ledger: UnitLedger, unit: int) -> None:
    state, used, segment = ledger._state[unit], ledger._used[unit], ledger._segment[unit]
    if segment is not None and used:
        raise LedgerError(f"unit {unit} holds segment {segment} and {used} live blocks")
    if segment is not None and ledger.binding == "fixed" and segment != unit:
        raise LedgerError(f"unit {unit} holds segment {segment} although the binding is fixed")
    if (segment is not None) != (state in (UnitState.BACKED, UnitState.RESTORING)):
        raise LedgerError(f"unit {unit} is {state} with segment {segment}")
    task = ledger._restoring.get(unit)
    if task is not None and (task.unit, task.segment) != (unit, segment):
        raise LedgerError(f"unit {unit} restores {task} but is reserved for segment {segment}")
    right = {
        UnitState.FREE: unit in ledger._free_units and used == 0,
        UnitState.BACKED: unit in ledger._backed,
        UnitState.RESTORING: task is not None,
        UnitState.AVAIL: ledger._avail.free_blocks(unit)
        == ledger.blocks_per_unit - used
        > 0
        < used,
        UnitState.FULL: used == ledger.blocks_per_unit,
    }
    if not right[state]:
        raise LedgerError(f"unit {unit} is {state} with {used} live blocks and is not listed so")
