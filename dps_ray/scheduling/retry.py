"""Bounded retries of failed restores, with a growing pause between them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How often and how fast a failed restore is tried again."""

    attempts: int = 5
    """Failures of one segment after which nothing is restored any more. A transient fault (a
    rank that lost a race for pinned memory) passes in one or two; a broken backup never does."""
    first_pause_s: float = 0.5
    """Pause after a first failure, seconds; each further failure of the segment doubles it."""


class RestoreRetry:
    """What failed, how often, and when the next restore may start.

    One segment that cannot be restored keeps the whole replica in fast mode, so a pause holds
    back every restore: copying the others meanwhile would only take memory from the KV cache.
    """

    def __init__(self, limits: RetryLimits) -> None:
        self._limits = limits
        self._failures: dict[int, int] = {}
        self._resume_at_s = -math.inf
        self._latest = (-1, "")
        """Segment and cause of the latest failure."""

    @property
    def exhausted(self) -> bool:
        """A segment failed as often as the limits allow: only ``reset`` starts anew."""
        return max(self._failures.values(), default=0) >= self._limits.attempts

    @property
    def fault(self) -> str | None:
        """Why full mode cannot return, in one line; ``None`` while no failure stands."""
        if not self._failures:
            return None
        segment, error = self._latest
        state = "retrying"
        if self.exhausted:
            state = f"gave up after {self._limits.attempts} attempts: change the pin to retry"
        # The cause comes last: it may be long, and a status page cuts it.
        return f"restore of residual segment {segment} failed; {state} ({error})"

    def may_start(self, now: float) -> bool:
        """Whether a restore may begin at ``now`` (seconds, monotonic)."""
        return not self.exhausted and now >= self._resume_at_s

    def pause_s(self, now: float) -> float:
        """How long the pause still lasts, seconds; 0 after it."""
        return max(0.0, self._resume_at_s - now)

    def failed(self, segment: int, error: str, now: float) -> None:
        """Record a failure of ``segment`` and begin the pause."""
        count = self._failures.get(segment, 0) + 1
        self._failures[segment] = count
        self._resume_at_s = now + self._limits.first_pause_s * 2 ** (count - 1)
        self._latest = segment, error

    def succeeded(self, segment: int) -> None:
        """Forget the failures of ``segment``."""
        self._failures.pop(segment, None)

    def reset(self) -> None:
        """Forget every failure, at an operator's request."""
        self._failures.clear()
        self._resume_at_s = -math.inf
