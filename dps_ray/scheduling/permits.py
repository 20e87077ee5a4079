"""What others allow a replica: the fleet its changes of mode, its requests their precision."""

from dataclasses import dataclass

from dps_ray.modes import Pin


@dataclass(frozen=True, slots=True)
class Permits:
    """Permissions of one scheduler step. The defaults are those of a replica on its own."""

    restore: bool = True
    """New restores may begin. Open ones run on without."""
    stop: bool = False
    """Open restores end now, and none begins."""
    fast: bool = True
    """The replica may leave full mode. One that is in fast mode already may lend on."""
    hold_full: bool = False
    """Requests that insist on full precision are on the replica: it does not switch under them,
    whatever the operator's pin says."""

    def keeps_full(self, pin: Pin) -> bool:
        """Whether a replica in full mode has to stay there."""
        return self.hold_full or (not self.fast and pin is not Pin.FAST)
