"""Words of the unit ledger: states of units and segments, a lend, and the ledger's error."""

from dataclasses import dataclass
from enum import StrEnum

from dps_ray.commands import RestoreTask


class LedgerError(RuntimeError):
    """An order the unit's state does not allow, or a broken invariant; the message says which."""


class UnitState(StrEnum):
    """What a physical unit holds (Algorithm 1, lines 1-3; RESTORING is ours)."""

    FREE = "free"
    """No live KV block and no residual segment."""
    BACKED = "backed"
    """Its residual segment, valid: lendable."""
    AVAIL = "avail"
    """Live KV blocks and at least one free block."""
    FULL = "full"
    """Live KV blocks and no free block."""
    RESTORING = "restoring"
    """Reserved for a residual segment whose copy is ordered or under way."""


class SegmentState(StrEnum):
    """Where a residual segment stands (Algorithm 1, lines 4-5)."""

    BOUND = "bound"
    """Its bytes are valid in a unit."""
    STALE = "stale"
    """Its unit was lent: the mapping leads to KV bytes, and no restore has been chosen."""
    EVICTED = "evicted"
    """A restore was chosen and has not succeeded: the bytes are on the host only, and the mapping
    leads to a unit without KV blocks (copy under way) or is waiting for another attempt."""


@dataclass(frozen=True, slots=True)
class Lend:
    """One unit given to the KV cache. It must be zeroed before its first KV write."""

    unit: int
    segment: int
    """The residual segment that lost the unit; it is STALE now."""
    cancelled: RestoreTask | None
    """The restore that this lend ended, where the unit was RESTORING."""
