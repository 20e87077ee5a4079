"""Who owns each physical unit of the shared region: Algorithm 1's bookkeeping.

The ledger decides nothing by itself and knows no clock. Every method keeps the invariants that
``check_ledger`` states, or raises ``LedgerError`` before it changes anything.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from dps_ray.commands import RestoreTask
from dps_ray.modes import Mode
from dps_ray.scheduling.packing import FullestFirst
from dps_ray.scheduling.states import LedgerError, Lend, SegmentState, UnitState


class UnitLedger:
    """States of all physical units and residual segments of one engine.

    There are as many segments as units, and the engine starts with segment ``i`` in unit ``i``.
    Ranks of a tensor-parallel group hold identical copies of the units, so one ledger serves all.

    Parameters
    ----------
    num_units
        Physical units of the shared region; 0 for a static engine.
    blocks_per_unit
        KV blocks in one unit.
    binding
        ``fixed``: segment ``i`` only ever lives in unit ``i``. ``any``: a segment returns to
        whichever unit is free, the longest waiting segment first.
    in_order
        Restore the lowest segments first, so that whole layers come back one after the other,
        instead of the longest free units and the longest waiting segments.
    """

    def __init__(
        self,
        num_units: int,
        blocks_per_unit: int,
        *,
        binding: Literal["fixed", "any"] = "fixed",
        in_order: bool = False,
    ) -> None:
        if num_units < 0:
            raise ValueError(f"num_units is {num_units}: give 0 (static engine) or more")
        if blocks_per_unit < 1:
            raise ValueError(f"blocks_per_unit is {blocks_per_unit}: a unit holds 1 block or more")
        self.num_units = num_units
        self.blocks_per_unit = blocks_per_unit
        self.binding = binding
        self._in_order = in_order
        self._state = [UnitState.BACKED] * num_units
        self._used = [0] * num_units
        self._segment: list[int | None] = list(range(num_units))
        self._segment_state = [SegmentState.BOUND] * num_units
        # Ordered sets. FREE and waiting segments: the longest standing first. BACKED: stack.
        self._free_units: OrderedDict[int, None] = OrderedDict()
        self._backed: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_units))
        self._restoring: OrderedDict[int, RestoreTask] = OrderedDict()
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._avail = FullestFirst(blocks_per_unit)
        self._num_full = 0
        self._kv_free_blocks = 0
        self._lendable_blocks = num_units * blocks_per_unit
        self._last_epoch = 0

    # -- reading ----------------------------------------------------------------------------------

    def state(self, unit: int) -> UnitState:
        """Return the state of ``unit``."""
        return self._state[unit]

    def segment_of(self, unit: int) -> int | None:
        """Return the segment that ``unit`` holds or is reserved for; ``None`` for a KV unit."""
        return self._segment[unit]

    def segment_state(self, segment: int) -> SegmentState:
        """Return the state of residual segment ``segment``."""
        return self._segment_state[segment]

    def count(self, state: UnitState) -> int:
        """Return how many units are in ``state``, in constant time."""
        match state:
            case UnitState.FREE:
                return len(self._free_units)
            case UnitState.BACKED:
                return len(self._backed)
            case UnitState.AVAIL:
                return len(self._avail)
            case UnitState.FULL:
                return self._num_full
            case UnitState.RESTORING:
                return len(self._restoring)

    def free_blocks(self, unit: int) -> int:
        """Return the KV blocks that ``unit`` can give without a lend."""
        if self._segment[unit] is not None:
            return 0
        return self.blocks_per_unit - self._used[unit]

    @property
    def kv_free_blocks(self) -> int:
        """Free blocks in FREE and AVAIL units."""
        return self._kv_free_blocks

    @property
    def lendable_blocks(self) -> int:
        """Blocks that lending every BACKED and RESTORING unit would give."""
        return self._lendable_blocks

    @property
    def fully_backed(self) -> bool:
        """Every residual segment is in place."""
        return len(self._backed) == self.num_units

    @property
    def restore_progress(self) -> float:
        """Share of residual segments in place, 0 to 1; 1 without units."""
        return len(self._backed) / self.num_units if self.num_units else 1.0

    @property
    def open_restores(self) -> tuple[RestoreTask, ...]:
        """Restores ordered and not yet ended, oldest first."""
        return tuple(self._restoring.values())

    def open_restore(self, unit: int) -> RestoreTask | None:
        """Return the restore under way in ``unit``, if any."""
        return self._restoring.get(unit)

    def mode_allowed(self) -> Mode:
        """Return the highest precision that the memory allows now."""
        return Mode.FULL if self.fully_backed else Mode.FAST

    def restorable_units(self) -> tuple[int, ...]:
        """Return the FREE units in the order in which they are to be restored."""
        return tuple(sorted(self._free_units) if self._in_order else self._free_units)

    def missing_segments(self) -> Iterator[int]:
        """Give the segments that are not in place."""
        yield from self._waiting
        yield from (task.segment for task in self._restoring.values())

    def live_blocks(self) -> dict[int, int]:
        """Return the live blocks of every unit that has some, in linear time."""
        return {unit: used for unit, used in enumerate(self._used) if used}

    def pick_unit(self) -> int | None:
        """Return the unit to allocate from next, or ``None`` when that takes a lend.

        The fullest AVAIL unit comes first, so that live blocks gather in few units and the others
        empty; then the longest free unit, whose prefix-cache contents are the oldest.
        """
        unit = self._avail.fullest()
        return unit if unit is not None else next(iter(self._free_units), None)

    # -- KV blocks --------------------------------------------------------------------------------

    def allocate(self, unit: int, n: int = 1) -> None:
        """Count ``n`` free blocks of KV unit ``unit`` as live (Algorithm 1, lines 21-25)."""
        if self._segment[unit] is not None:
            raise LedgerError(f"unit {unit} is {self._state[unit]}: lend it before allocating")
        if not 1 <= n <= self.blocks_per_unit - self._used[unit]:
            raise LedgerError(
                f"cannot allocate {n} blocks in unit {unit}: {self.free_blocks(unit)} are free"
            )
        self._move_kv(unit, self._used[unit] + n)

    def release(self, unit: int, n: int = 1) -> None:
        """Count ``n`` live blocks of ``unit`` as free (Algorithm 1, lines 31-36)."""
        if not 1 <= n <= self._used[unit]:
            raise LedgerError(
                f"cannot release {n} blocks in unit {unit}: {self._used[unit]} are live"
            )
        self._move_kv(unit, self._used[unit] - n)

    def lend(self) -> Lend | None:
        """Give one unit to the KV cache (Algorithm 1, lines 12-15); ``None`` when none is left.

        A RESTORING unit goes first, the one begun last: its segment is of no use until complete,
        whereas each BACKED unit taken adds a whole segment to the next return to full mode.
        """
        cancelled: RestoreTask | None = None
        if self._restoring:
            unit, cancelled = self._restoring.popitem()
        elif self._backed:
            unit, _ = self._backed.popitem()
        else:
            return None
        segment = self._detach(unit)
        self._segment_state[segment] = SegmentState.STALE
        return Lend(unit, segment, cancelled)

    # -- restoring --------------------------------------------------------------------------------

    def begin_restore(self, unit: int) -> RestoreTask:
        """Reserve FREE unit ``unit`` for a segment that is not in place."""
        if self._state[unit] is not UnitState.FREE:
            raise LedgerError(
                f"unit {unit} is {self._state[unit]}: only a free unit can take back a segment"
            )
        waiting = min if self._in_order else next
        segment = unit if self.binding == "fixed" else waiting(iter(self._waiting))
        self._last_epoch += 1
        task = RestoreTask(unit=unit, segment=segment, epoch=self._last_epoch)
        del self._free_units[unit]
        del self._waiting[segment]
        self._kv_free_blocks -= self.blocks_per_unit
        self._lendable_blocks += self.blocks_per_unit
        self._restoring[unit] = task
        self._segment[unit] = segment
        self._state[unit] = UnitState.RESTORING
        self._segment_state[segment] = SegmentState.EVICTED
        return task

    def complete_restore(self, task: RestoreTask) -> bool:
        """Bind the restored segment; ``False`` where ``task`` is no longer the unit's restore."""
        if self._restoring.get(task.unit) != task:
            return False
        del self._restoring[task.unit]
        self._backed[task.unit] = None
        self._state[task.unit] = UnitState.BACKED
        self._segment_state[task.segment] = SegmentState.BOUND
        return True

    def abandon_restore(self, task: RestoreTask) -> bool:
        """Give the unit of a failed or stopped restore back; ``False`` where ``task`` is outdated.

        The unit is FREE and holds part of a segment: it must be zeroed before its first KV write.
        The segment stays EVICTED and waits behind the others.
        """
        if self._restoring.get(task.unit) != task:
            return False
        del self._restoring[task.unit]
        self._detach(task.unit)
        return True

    # -- internals --------------------------------------------------------------------------------

    def _detach(self, unit: int) -> int:
        """Make ``unit`` a FREE one; its segment joins the waiting ones. Returns the segment."""
        segment = self._segment[unit]
        assert segment is not None
        self._segment[unit] = None
        self._waiting[segment] = None
        self._state[unit] = UnitState.FREE
        self._free_units[unit] = None
        self._kv_free_blocks += self.blocks_per_unit
        self._lendable_blocks -= self.blocks_per_unit
        return segment

    def _move_kv(self, unit: int, used: int) -> None:
        """Set the live blocks of a KV unit and enter it under its new state."""
        before = self._state[unit]
        if before is UnitState.FREE:
            del self._free_units[unit]
        elif before is UnitState.AVAIL:
            self._avail.remove(unit, self.blocks_per_unit - self._used[unit])
        else:
            self._num_full -= 1
        self._kv_free_blocks += self._used[unit] - used
        self._used[unit] = used
        if used == 0:
            self._state[unit] = UnitState.FREE
            self._free_units[unit] = None
        elif used < self.blocks_per_unit:
            self._state[unit] = UnitState.AVAIL
            self._avail.add(unit, self.blocks_per_unit - used)
        else:
            self._state[unit] = UnitState.FULL
            self._num_full += 1
