"""When a replica changes its precision: thresholds, hysteresis and dwell times.

Algorithm 1 of the paper has no thresholds: it goes fast when an allocation overwrites a unit and
restores as soon as a unit is free. This policy keeps the first rule and bounds the second.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.trend import DemandTrend


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """The switching options of ``DpsOptions``, which documents and checks them."""

    high_watermark: float
    """Demand, as a share of base KV blocks, at which the replica goes fast without a lend.
    1.0 leaves the switch to lending alone."""
    low_watermark: float
    """Demand, as a share of base KV blocks, at or below which the replica returns."""
    min_fast_dwell_s: float
    """Shortest time from the latest lend or switch to fast mode to the return, seconds."""
    min_full_dwell_s: float
    """Shortest stay in full mode, seconds; lending is refused meanwhile."""
    trend_horizon_s: float = 0.0
    """How far growing demand is projected ahead before both thresholds are asked, seconds."""


class Pressure(NamedTuple):
    """Demand for KV blocks at one scheduler step."""

    used_blocks: int
    """Blocks held by live requests, in base and elastic memory."""
    base_blocks: int
    """KV blocks that exist without lending."""
    waiting_requests: int = 0
    """Requests that hold no blocks yet, or lost theirs to preemption."""
    waiting_blocks: int | None = None
    """Blocks that the waiting requests will need at least; ``None`` when unknown."""

    @property
    def demand_blocks(self) -> int:
        """Blocks in use and, where known, blocks waited for."""
        return self.used_blocks + (self.waiting_blocks or 0)

    @property
    def demand_known(self) -> bool:
        """No request of unknown size is waiting."""
        return self.waiting_requests == 0 or self.waiting_blocks is not None


class SwitchPolicy:
    """A two-threshold (Schmitt) trigger over KV demand, with dwell times and the operator's pin.

    The trigger says where the replica is heading; the mode follows once the memory allows it.
    Every method takes the current time ``now`` in seconds of one monotonic clock.

    Parameters
    ----------
    limits
        Thresholds and dwell times.
    mode
        Mode at start-up. No dwell applies to it.
    """

    def __init__(self, limits: SwitchLimits, mode: Mode = Mode.FULL) -> None:
        self.limits = limits
        self._mode = mode
        self._heading = mode
        self._full_since = -math.inf
        self._pressed_at = -math.inf
        self._trend = DemandTrend(limits.trend_horizon_s)

    def observe(self, pressure: Pressure, now: float) -> None:
        """Learn from the demand of a step where it is going; once a step, before the questions."""
        self._trend.observe(pressure.demand_blocks, now)

    @property
    def mode(self) -> Mode:
        """Mode of the latest step."""
        return self._mode

    @property
    def heading(self) -> Mode:
        """Mode that the replica is on its way to, or in."""
        return self._heading

    def may_lend(self, pin: Pin, now: float) -> bool:
        """Whether an allocation that does not fit otherwise may take weight memory."""
        return pin is not Pin.FULL and not self._in_full_dwell(now)

    def wants_fast(self, pressure: Pressure, now: float) -> bool:
        """Whether demand alone calls for fast mode, ahead of any lend."""
        high = self.limits.high_watermark
        return (
            high < 1.0
            and self._trend.ahead(pressure.demand_blocks) >= high * pressure.base_blocks
            and not self._in_full_dwell(now)
        )

    def stays_full(self, pin: Pin) -> bool:
        """Whether no demand makes a replica in full mode leave it, as long as nothing is lent."""
        by_demand = pin is Pin.AUTO and self.limits.high_watermark < 1.0
        return self._heading is Mode.FULL and pin is not Pin.FAST and not by_demand

    def may_restore(self, pressure: Pressure, pin: Pin, now: float) -> bool:
        """Whether restoring may start: demand is low, none of it is hidden, the dwell is over."""
        if pin is not Pin.AUTO:
            return pin is Pin.FULL
        return (
            pressure.demand_known
            and self._trend.ahead(pressure.demand_blocks)
            <= self.limits.low_watermark * pressure.base_blocks
            and now - self._pressed_at >= self.limits.min_fast_dwell_s
        )

    def dwell_left_s(self, pin: Pin, now: float) -> float:
        """How long the stay in fast mode must still last before restoring may start, seconds."""
        if pin is Pin.FULL:
            return 0.0
        return max(0.0, self._pressed_at + self.limits.min_fast_dwell_s - now)

    def note_lend(self, now: float) -> None:
        """Record that weight memory was lent: the replica heads for fast mode from here."""
        self._heading = Mode.FAST
        self._pressed_at = now

    def next_mode(
        self, pressure: Pressure, pin: Pin, *, allowed: Mode, now: float, stay_full: bool = False
    ) -> Mode:
        """Decide the mode of the step being planned, without recording it.

        ``allowed`` is the highest precision that the memory allows; with ``stay_full`` a replica in
        full mode remains there, which presumes that nothing was lent.
        Between the thresholds the heading stays what it was, so a return that began at the low
        one completes although demand has grown since, unless it reaches the high one.
        """
        if stay_full and self._mode is Mode.FULL:
            return allowed
        if pin is not Pin.AUTO:
            self._heading = Mode(pin.value)
        elif self._heading is Mode.FULL and self.wants_fast(pressure, now):
            self._heading = Mode.FAST
        elif self._heading is Mode.FAST and self.may_restore(pressure, pin, now):
            self._heading = Mode.FULL
        return allowed if self._heading is Mode.FULL else Mode.FAST

    def note_mode(self, mode: Mode, now: float) -> bool:
        """Record the mode of the step just planned; ``True`` where it is a switch."""
        if mode is self._mode:
            return False
        self._mode = mode
        if mode is Mode.FULL:
            self._full_since = now
        else:
            self._pressed_at = now
        return True

    def _in_full_dwell(self, now: float) -> bool:
        return self._mode is Mode.FULL and now - self._full_since < self.limits.min_full_dwell_s
