"""What the whole fleet looks like to those who decide on one replica."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from dps_ray.fleet.snapshot import Entry, Standing


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Sums over a fleet."""

    live: int
    present: int
    """Live and stale replicas."""
    headroom_blocks: int
    """Of live replicas that do not restore and know it."""
    total_blocks: int
    """KV blocks of the same replicas."""
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Both sums' parts by replica."""

    def others_spare_less_than(self, share: float, replica_id: str) -> bool:
        """Whether the headroom of all replicas but one is below a share of their KV memory.

        The one is left out whether or not it restores at this moment: with its own headroom in the
        sum a restore would be stopped, be allowed again at once, and be stopped again.
        """
        headroom, total = self.parts.get(replica_id, (0, 0))
        others = self.total_blocks - total
        return others > 0 and self.headroom_blocks - headroom < share * others

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Self:
        """Sum up a snapshot."""
        live = present = headroom = total = 0
        parts: dict[str, tuple[int, int]] = {}
        for entry in entries:
            cut_off = entry.lost_ago_s is not None
            present += entry.standing in (Standing.LIVE, Standing.STALE) or cut_off
            state = entry.state
            if entry.standing is not Standing.LIVE or state is None:
                continue
            live += 1
            if not state.restoring and state.headroom_blocks is not None and state.total_blocks:
                headroom += state.headroom_blocks
                total += state.total_blocks
                parts[entry.replica_id] = state.headroom_blocks, state.total_blocks
        return cls(live, present, headroom, total, parts)
