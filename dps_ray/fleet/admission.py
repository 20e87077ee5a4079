"""How long requests wait to be placed, and when to come back for those that are turned away."""

import math
from collections import deque
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dps_ray.fleet.state import Seconds


class AdmissionOptions(BaseModel):
    """Limits on waiting at the ingress. Every refusal is a 503 with ``Retry-After``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    full_wait_s: Seconds = 10.0
    """Longest wait of a request that insists on full precision, from its arrival to its place on a
    replica in full mode, seconds. It may ask for less with the header ``X-DPS-Wait-S``."""
    no_replica_wait_s: Seconds = 120.0
    """Longest wait while no replica can serve at all, seconds: it bridges the start of one."""
    max_waiting: Annotated[int, Field(ge=0)] = 512
    """Most requests that may wait at one ingress replica for a place on the replicas. Beyond it the
    least urgent is shed, the youngest among equals."""
    queue_wait_s: Seconds = 120.0
    """Longest wait in that queue, seconds. A request may ask for less with the header
    ``X-DPS-Wait-S``."""
    priority_ageing_s: Annotated[float, Field(gt=0.0, le=1e9)] = 30.0
    """Wait that makes a request as urgent as one of the next priority that has just arrived,
    seconds: so long a request can be overtaken by that priority, and twice as long by the one
    after it. Holds for requests that arrive after a change."""
    min_retry_after_s: Annotated[float, Field(ge=1.0)] = 2.0
    """Shortest ``Retry-After``, seconds; also used where no drain rate is known."""
    max_retry_after_s: Annotated[float, Field(ge=1.0)] = 60.0

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.min_retry_after_s > self.max_retry_after_s:
            raise ValueError(
                f"min_retry_after_s ({self.min_retry_after_s:g}) must not be above "
                f"max_retry_after_s ({self.max_retry_after_s:g})"
            )
        return self

    def longest_full_wait_s(self, asked_s: float | None) -> float:
        """How long a request that insists on full precision may wait in all, seconds.

        Parameters
        ----------
        asked_s
            What it says itself; ``None`` for nothing.
        """
        return self.full_wait_s if asked_s is None else min(self.full_wait_s, asked_s)


class DrainRate:
    """How fast requests are served, over the recent past.

    Parameters
    ----------
    window_s
        Length of the past that counts, seconds.
    """

    def __init__(self, window_s: float = 20.0) -> None:
        self._window_s = window_s
        self._ends_s: deque[float] = deque()
        self._since_s: float | None = None

    def note(self, now_s: float) -> None:
        """A request was served, or has left the queue to be."""
        if self._since_s is None:
            self._since_s = now_s
        self._ends_s.append(now_s)
        self._trim(now_s)

    def per_s(self, now_s: float) -> float | None:
        """Requests per second; ``None`` before the first."""
        self._trim(now_s)
        if self._since_s is None or not self._ends_s:
            return None
        return len(self._ends_s) / max(1.0, min(self._window_s, now_s - self._since_s))

    def _trim(self, now_s: float) -> None:
        while self._ends_s and now_s - self._ends_s[0] > self._window_s:
            self._ends_s.popleft()


def retry_after_s(options: AdmissionOptions, queued: int, drain_per_s: float | None) -> float:
    """Whole seconds until a place in the queue can be expected: the queue over its drain rate.

    Parameters
    ----------
    options
        Bounds of the answer.
    queued
        Requests before this one.
    drain_per_s
        Rate at which they end; ``None`` when unknown.
    """
    expected_s = options.min_retry_after_s if not drain_per_s else (queued + 1) / drain_per_s
    bounded_s = min(max(expected_s, options.min_retry_after_s), options.max_retry_after_s)
    return float(math.ceil(bounded_s))
