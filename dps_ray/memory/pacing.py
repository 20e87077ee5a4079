"""How fast the restore may copy, judged by what it does to the steps that run beside it."""

import threading
import time
from collections.abc import Callable

_BASELINE_WEIGHT = 0.2
_INFLATION_WEIGHT = 0.3
_SLOWEST_CUT = 0.5
_FASTEST_RISE = 1.25
_PIECES_PER_CHUNK = 8
_PIECE_UNIT_BYTES = 64 << 10


class Pacer:
    """Paces chunks of a restore by step-time inflation.

    Steps without a restore give a baseline per load. Steps with one are compared with it: the rate
    is multiplied by ``max_inflation / inflation`` (within 0.5 and 1.25), as the stretch caused by
    copying grows with its rate. With no load the restore runs unpaced. All methods are
    thread-safe.

    Parameters
    ----------
    max_inflation
        Stretch of step times that the restore may cause, as a share (0.05: 5%).
    floor_bytes_per_s
        The rate never falls below this, bytes per second.
    clock
        Monotonic time, seconds.
    idle_after_s
        With no step for this long the replica counts as idle, seconds.
    """

    def __init__(
        self,
        *,
        max_inflation: float,
        floor_bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        idle_after_s: float = 1.0,
    ) -> None:
        self._max_inflation = max_inflation
        self._floor = floor_bytes_per_s
        self._clock = clock
        self._idle_after_s = idle_after_s
        self._lock = threading.Lock()
        self._baseline_s: dict[int, float] = {}
        self._inflation = 0.0
        self._rate: float | None = None
        self._link_rate: float | None = None
        self._last_chunk: tuple[float, int] | None = None
        self._due = clock()
        self._busy_until = clock()

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Rate under load, bytes per second; ``None`` while unpaced."""
        return self._rate

    def note_step(self, duration_s: float, restoring: bool, load: int | None) -> None:
        """Learn from one finished forward pass.

        Parameters
        ----------
        duration_s
            Its duration, seconds.
        restoring
            Whether residual bytes were copied meanwhile.
        load
            Its size, for example tokens; 0 means an idle step; ``None`` when unknown.
        """
        with self._lock:
            if load == 0:
                self._busy_until = self._clock()
                return
            self._busy_until = self._clock() + max(self._idle_after_s, 2 * duration_s)
            bucket = -1 if load is None else load.bit_length()
            if not restoring:
                known_s = self._baseline_s.get(bucket, duration_s)
                self._baseline_s[bucket] = known_s + _BASELINE_WEIGHT * (duration_s - known_s)
            elif self._baseline_s:
                self._adjust(duration_s / self._expected_s(bucket) - 1.0)

    def next_delay_s(self, chunk_bytes: int) -> float:
        """Wait this long, seconds, before copying the next chunk; call once per chunk."""
        with self._lock:
            now = self._clock()
            self._measure_link(now, chunk_bytes)
            if self._rate is None or now >= self._busy_until:
                self._due = now
                return 0.0
            interval_s = chunk_bytes / self._rate
            # At most one chunk ahead: a cancelled wait must not be paid for by later restores.
            delay_s = min(max(0.0, self._due - now), interval_s)
            self._due = now + delay_s + interval_s
            # A delayed chunk says nothing about the link.
            if delay_s > 0:
                self._last_chunk = None
            return delay_s

    def piece_bytes(self, chunk_bytes: int) -> int:
        """Bytes to copy at once: a chunk, or a small part of one while the rate is held down.

        At a given rate, small pieces stretch every step a little; whole chunks would stretch a few
        steps by a lot, which is what the slowest percentile shows.
        """
        with self._lock:
            paced = self._rate is not None and self._clock() < self._busy_until
        piece_bytes = chunk_bytes // _PIECES_PER_CHUNK // _PIECE_UNIT_BYTES * _PIECE_UNIT_BYTES
        return piece_bytes if paced and piece_bytes else chunk_bytes

    def _measure_link(self, now: float, chunk_bytes: int) -> None:
        if self._last_chunk is not None:
            started, nbytes = self._last_chunk
            if now > started:
                measured = nbytes / (now - started)
                self._link_rate = max(measured, self._link_rate or 0.0)
        self._last_chunk = (now, chunk_bytes)

    def _expected_s(self, bucket: int) -> float:
        nearest = min(self._baseline_s, key=lambda known: abs(known - bucket))
        return max(self._baseline_s[nearest], 1e-9)

    def _adjust(self, inflation: float) -> None:
        self._inflation += _INFLATION_WEIGHT * (inflation - self._inflation)
        if self._inflation <= 0:
            factor = _FASTEST_RISE
        else:
            factor = self._max_inflation / self._inflation
            factor = min(max(factor, _SLOWEST_CUT), _FASTEST_RISE)
        link_rate = max(self._link_rate or self._floor, self._floor)
        rate = (self._rate or link_rate) * factor
        unpaced = factor >= 1.0 and rate >= link_rate
        self._rate = None if unpaced else max(self._floor, rate)
        # The average still holds steps at the old rate: carry it over to the new one.
        self._inflation *= factor
