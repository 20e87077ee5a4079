"""The paper's restore: one 4 MiB chunk at a time, throttled, whatever steps run beside it."""

import time

from dps_ray.memory.pacing import Pacer

PAPER_CHUNK_BYTES = 4 << 20
PAPER_CHUNK_S = 3.3e-3
"""The paper's restore moves one 4 MiB chunk in so much time (607 ms for a unit of 736 MiB)."""
PAPER_LIMITS = {"min_fast_dwell_s": 0.0, "trend_horizon_s": 0.0, "low_watermark": 0.99}
"""Options of a replica that restores as soon as a unit is free (Algorithm 1, line 37)."""


class ThrottledPacer(Pacer):
    """Paces by the paper's rule; it never hears of a step, so none changes its rate."""

    def __init__(self) -> None:
        super().__init__(max_inflation=0.0, floor_bytes_per_s=PAPER_CHUNK_BYTES / PAPER_CHUNK_S)
        self._next_s = time.monotonic()

    def begin_step(self) -> None:
        return

    def note_step(
        self, duration_s: float, restoring: bool, load: int | None, full_share: float = 0.0
    ) -> None:
        return

    def next_delay_s(self, chunk_bytes: int) -> float:
        now = time.monotonic()
        delay_s = max(0.0, self._next_s - now)
        self._next_s = now + delay_s + chunk_bytes / PAPER_CHUNK_BYTES * PAPER_CHUNK_S
        return delay_s
