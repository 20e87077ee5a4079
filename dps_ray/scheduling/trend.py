"""Where demand is going: its slope, smoothed."""

import math


class DemandTrend:
    """Exponentially averaged slope of demand, and demand projected along it.

    Parameters
    ----------
    horizon_s
        Time constant of the average, and how far ahead is looked, seconds. 0 switches it off.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._slope = 0.0
        self._latest: tuple[float, int] | None = None

    @property
    def blocks_per_s(self) -> float:
        """Slope of demand, blocks per second."""
        return self._slope

    def observe(self, demand_blocks: int, now: float) -> None:
        """Take in the demand at ``now`` (seconds, monotonic)."""
        if self._horizon_s <= 0.0:
            return
        if self._latest is not None:
            before, blocks = self._latest
            passed_s = now - before
            if passed_s <= 0.0:
                return
            weight = 1.0 - math.exp(-passed_s / self._horizon_s)
            self._slope += weight * ((demand_blocks - blocks) / passed_s - self._slope)
        self._latest = (now, demand_blocks)

    def ahead(self, demand_blocks: int) -> float:
        """Demand one horizon ahead if it goes on growing; falling demand is not counted on."""
        return demand_blocks + max(self._slope, 0.0) * self._horizon_s
