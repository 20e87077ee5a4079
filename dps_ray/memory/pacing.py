"""How fast the restore may copy, judged by what it does to the steps that run beside it."""

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from dps_ray.memory.step_slices import StepSlices

_STEPS_KEPT = 32
_STEPS_JUDGED = 8
_STEPS_ALARMED = 3
_ALARM = 4.0
"""Stretch of a few steps in a row, as a multiple of the allowed one, that is answered at once."""
_TARGET_SHARE = 0.5
"""The typical step is stretched by this share of what is allowed: the slowest ones get more."""
_START_SHARE = 1 / 16
_SLOWEST_CUT = 0.5
_FIRST_RISE, _LATER_RISE = 2.0, 1.5
_PIECES_PER_STEP = 2
"""More would stretch steps more evenly, but each interrupts the step anew, which costs more than
its bytes do."""
_PIECE_UNIT_BYTES = 64 << 10
_LINK_WEIGHT = 0.2


class Pacer:
    """Paces chunks of a restore by step-time inflation.

    Steps without a restore give a baseline per load. A few steps with one are compared with it, by
    their median: one slow step means nothing. The rate is then multiplied by what is aimed at over
    what was found, as the stretch caused by copying grows with its rate.

    A restore under load starts at a sixteenth of the link and doubles until it is first found to
    stretch steps too much; from then on the rate rises more slowly and is kept from restore to
    restore. With no load the restore runs unpaced. All methods are thread-safe.

    Where copies take the cores that steps compute on, nothing of this is needed under load: the
    steps' own thread copies slices, and what those cost is known.

    Parameters
    ----------
    max_inflation
        Stretch of step times that the restore may cause, as a share (0.05: 5%).
    floor_bytes_per_s
        The rate never falls below this, bytes per second.
    cap_bytes_per_s
        The rate never rises above this, bytes per second, idle or not; ``None`` for no cap.
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
        cap_bytes_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        idle_after_s: float = 1.0,
    ) -> None:
        self._max_inflation = max_inflation
        self._floor = floor_bytes_per_s
        self._cap = cap_bytes_per_s
        self._clock = clock
        self._idle_after_s = idle_after_s
        self._lock = threading.Lock()
        self._alone_s: dict[bool, dict[int, deque[float]]] = {False: {}, True: {}}
        """Latest durations of steps without a restore: fast and full ones, by load."""
        self._stretched: list[float] = []
        """Durations of steps with a restore since the rate was set, as shares of the baseline."""
        self._step_s = 0.0
        self._chosen_rate: float | None = None
        self._rise = _FIRST_RISE
        self._link_rate: float | None = None
        self._due = clock()
        self._busy_until = clock()
        self._passes = 0
        """Begun and not ended."""
        self._slices = StepSlices(
            max_inflation=max_inflation,
            floor_bytes_per_s=floor_bytes_per_s,
            cap_bytes_per_s=cap_bytes_per_s,
        )

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Rate under load, bytes per second; ``None`` while unpaced."""
        with self._lock:
            return self._rate()

    def begin_step(self) -> None:
        """Slow down before the first step after a rest ends, not behind it."""
        with self._lock:
            self._passes += 1
            wait_s = max(self._idle_after_s, 2 * self._step_s)
            self._busy_until = max(self._busy_until, self._clock() + wait_s)

    def note_step(
        self, duration_s: float, restoring: bool, load: int | None, full_share: float = 0.0
    ) -> None:
        """Learn from one finished forward pass.

        Parameters
        ----------
        duration_s
            Its duration, seconds.
        restoring
            Whether residual bytes were copied meanwhile.
        load
            Its size, for example tokens; 0 means an idle step; ``None`` when unknown.
        full_share
            Share of the layers that ran in full precision. A step in between is expected to take
            as long as its share says: what layers cost that returned is not the restore's doing.
        """
        with self._lock:
            if load == 0:
                self._passes = 0
                self._busy_until = self._clock()
                return
            self._passes = max(0, self._passes - 1)
            self._busy_until = self._clock() + max(self._idle_after_s, 2 * duration_s)
            self._step_s = duration_s
            self._slices.step_ended(duration_s)
            bucket = -1 if load is None else load.bit_length()
            if not restoring:
                if full_share in (0.0, 1.0):
                    alone_s = self._alone_s[full_share == 1.0]
                    alone_s.setdefault(bucket, deque(maxlen=_STEPS_KEPT)).append(duration_s)
            elif any(self._alone_s.values()):
                self._stretched.append(duration_s / self._expected_s(bucket, full_share))
                self._judge()

    def note_copy(self, nbytes: int, seconds: float) -> None:
        """Learn what the link can do from one chunk: its bytes, and the time it had the link."""
        with self._lock:
            measured = nbytes / max(seconds, 1e-9)
            known = self._link_rate or measured
            self._link_rate = known + _LINK_WEIGHT * (measured - known)

    @property
    def busy_left_s(self) -> float:
        """How long the replica counts as busy if no further step ends, seconds; 0 when idle.

        It never runs out amid a pass, however long that is compared with those before it. On a
        device the end of the last pass may be noticed only with the next one: ask it on hosts.
        """
        with self._lock:
            least_s = self._idle_after_s if self._passes else 0.0
            return max(least_s, self._busy_until - self._clock())

    @property
    def slice_bytes(self) -> int:
        """What the thread of the step that has ended may copy before the next one, bytes."""
        with self._lock:
            return self._slices.nbytes

    def note_slice(self, nbytes: int, seconds: float) -> None:
        """Pay for a slice that held the next step up for ``seconds``; of 0 bytes: a wait."""
        with self._lock:
            self._slices.copied(nbytes, seconds)

    def next_delay_s(self, chunk_bytes: int) -> float:
        """Wait this long, seconds, before copying the next chunk; call once per chunk."""
        with self._lock:
            now = self._clock()
            rate = self._rate() if now < self._busy_until else None
            if self._cap is not None:
                rate = min(rate or self._cap, self._cap)
            if rate is None:
                self._due = now
                return 0.0
            interval_s = chunk_bytes / rate
            # At most one chunk ahead: a cancelled wait must not be paid for by later restores.
            delay_s = min(max(0.0, self._due - now), interval_s)
            self._due = now + delay_s + interval_s
            return delay_s

    def piece_bytes(self, chunk_bytes: int) -> int:
        """Bytes to copy at once: a chunk, or less of one while the rate is held down.

        At a given rate, several pieces a step stretch every step alike; whole chunks would stretch
        a few by a lot, which is what the slowest percentile shows.
        """
        with self._lock:
            rate = self._rate()
            if rate is None or self._clock() >= self._busy_until:
                return chunk_bytes
            units = int(rate * self._step_s / _PIECES_PER_STEP) // _PIECE_UNIT_BYTES
            return min(chunk_bytes, max(units, 1) * _PIECE_UNIT_BYTES)

    def _rate(self) -> float | None:
        """The rate under load; ``None`` where it is the link's own."""
        rate = self._chosen_rate
        if rate is None:
            rate = max(self._floor, _START_SHARE * (self._link_rate or 0.0))
        return rate if self._link_rate is None or rate < self._link_rate else None

    def _expected_s(self, bucket: int, full_share: float) -> float:
        fast_s, full_s = (
            median(alone_s[min(alone_s, key=lambda known: abs(known - bucket))])
            for alone_s in (
                self._alone_s[full] or self._alone_s[not full] for full in (False, True)
            )
        )
        return max(fast_s + full_share * (full_s - fast_s), 1e-9)

    def _judge(self) -> None:
        """Set the rate anew once enough steps have shown what the present one does."""
        latest = self._stretched[-_STEPS_ALARMED:]
        if len(latest) == _STEPS_ALARMED and min(latest) - 1.0 > _ALARM * self._max_inflation:
            stretch = median(latest) - 1.0
        elif len(self._stretched) == _STEPS_JUDGED:
            stretch = median(self._stretched) - 1.0
        else:
            return
        self._stretched.clear()
        target = _TARGET_SHARE * self._max_inflation
        factor = self._rise if stretch <= 0 else target / stretch
        factor = min(max(factor, _SLOWEST_CUT), self._rise)
        if factor < 1.0:
            self._rise = _LATER_RISE
        rate = self._rate() or self._link_rate or self._floor
        self._chosen_rate = max(self._floor, min(rate, self._link_rate or rate) * factor)
