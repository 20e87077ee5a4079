"""How much of a restore a step's own thread copies when the step has ended."""

import math

from dps_ray.memory.checksum import ROW_BYTES

_TARGET_SHARE = 0.5
"""Of the stretch that is allowed: the slowest slices take longer than the typical one."""
_FIRST_BYTES_PER_S = 1e9
_RATE_WEIGHT = 0.2
_MOST_OWED = 4.0
"""Slices that a slow one may cost those after it."""


class StepSlices:
    """A budget of time: each step earns a share of its duration, and slices of copies spend it.

    So what a restore costs the steps is known and not inferred: no noise of step times can raise
    it. Not thread-safe.

    Parameters
    ----------
    max_inflation
        Stretch of step times that the restore may cause, as a share (0.05: 5%).
    floor_bytes_per_s
        Slices carry at least this much on average, bytes per second, whatever they cost.
    cap_bytes_per_s
        And at most this much; ``None`` for no cap.
    """

    def __init__(
        self,
        *,
        max_inflation: float,
        floor_bytes_per_s: float,
        cap_bytes_per_s: float | None = None,
    ) -> None:
        self._share = _TARGET_SHARE * max_inflation
        self._floor = floor_bytes_per_s
        self._cap = math.inf if cap_bytes_per_s is None else cap_bytes_per_s
        self._rate = max(_FIRST_BYTES_PER_S, floor_bytes_per_s)
        self._saved_s = 0.0
        self._due_bytes = 0.0

    def step_ended(self, duration_s: float) -> None:
        """Earn a share of a step of ``duration_s`` seconds."""
        earned_s = duration_s * min(self._share, self._cap / self._rate)
        # What no slice has spent is lost, but for less than a row: a slice is bounded by its step.
        most_s = earned_s + ROW_BYTES / self._rate
        self._saved_s = min(max(self._saved_s, -_MOST_OWED * earned_s) + earned_s, most_s)
        self._due_bytes = min(self._due_bytes, ROW_BYTES) + self._floor * duration_s

    @property
    def nbytes(self) -> int:
        """Size of the slice to copy now, bytes, whole rows of the checksum; 0: nothing is saved."""
        rows = int(max(self._rate * self._saved_s, self._due_bytes)) // ROW_BYTES
        return rows * ROW_BYTES

    def copied(self, nbytes: int, seconds: float) -> None:
        """Pay for a slice, and learn from it how fast the next one will be; 0 bytes: a wait."""
        self._saved_s -= seconds
        self._due_bytes = max(0.0, self._due_bytes - nbytes)
        if nbytes:
            self._rate += _RATE_WEIGHT * (nbytes / max(seconds, 1e-9) - self._rate)
