"""What a SUM manager has done since the engine started."""

from dataclasses import dataclass

from dps_ray.modes import Mode


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    switches_to_fast: int = 0
    switches_to_full: int = 0
    units_lent: int = 0
    blocks_moved: int = 0
    """Live KV blocks moved to base memory so that their units could be restored."""
    prefixes_saved: int = 0
    """Cached prefix blocks moved to base memory before their units were restored."""
    restores_started: int = 0
    restores_completed: int = 0
    restores_cancelled: int = 0
    """Restores that a lend or the fleet ended."""
    restores_failed: int = 0
    last_restore_s: float | None = None
    """Latest return to full mode: from the first restore after the last lend to the mode's flip."""

    def switched_to(self, mode: Mode) -> None:
        """Count a switch."""
        if mode is Mode.FULL:
            self.switches_to_full += 1
        else:
            self.switches_to_fast += 1
