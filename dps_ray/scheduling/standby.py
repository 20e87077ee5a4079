"""An engine without requests: whether its memory is still to come back, and when to look again."""

from collections.abc import Callable

from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.policy import SwitchPolicy
from dps_ray.scheduling.residual_return import ResidualReturn

PERMIT_POLL_S = 0.02
"""Pause between two looks at the fleet's permit, seconds."""


class Standby:
    """What an idle engine must keep stepping for, and how long its steps would change nothing.

    Parameters
    ----------
    ledger, policy, residual, clock
        The manager's own.
    """

    def __init__(
        self,
        ledger: UnitLedger,
        policy: SwitchPolicy,
        residual: ResidualReturn,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._return = residual
        self._clock = clock

    def has_pending_work(self, pin: Pin) -> bool:
        """Whether restores run, or could begin or go on on an idle engine, dwell and retry pauses
        included, or the mode has yet to follow."""
        if self._return.running:
            return True
        if pin is Pin.FAST:
            return self._policy.mode is not Mode.FAST
        if self._ledger.fully_backed:
            return self._policy.mode is not Mode.FULL
        return self._could_restore and not self._return.retry.exhausted

    def pause_s(self, pin: Pin, *, awaits_permit: bool) -> float:
        """What is left of the dwell or of a retry's pause, or a moment while only the fleet's
        permit is missing; 0 while restores run."""
        if awaits_permit:
            return PERMIT_POLL_S
        if self._return.running or not self._could_restore:
            return 0.0
        now = self._clock()
        return max(self._policy.dwell_left_s(pin, now), self._return.retry.pause_s(now))

    @property
    def _could_restore(self) -> bool:
        return bool(self._ledger.restorable_units()) or self._return.held
