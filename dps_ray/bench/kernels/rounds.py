"""Interleaved timing: every contender takes a turn in every round, and figures are ratios.

Machines drift (other tenants, clock rates), but a round is short: a ratio of two turns of one
round is what the drift leaves alone. Nothing here knows what is timed.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one figure over the rounds."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""


def spread(values: Sequence[float]) -> Spread:
    """Summarise one figure of every round."""
    low, median, high = (float(value) for value in np.percentile(values, [25, 50, 75]))
    return Spread(median, low, high)


@dataclass(frozen=True)
class Pace:
    """How long and how often to measure."""

    max_rounds: int = 25
    min_rounds: int = 5
    row_s: float = 1.5
    """Time for all rounds of one comparison, seconds; at least ``min_rounds`` are run."""
    turn_s: float = 0.004
    """Shortest turn, seconds: quicker calls are repeated within it."""


@dataclass
class Contender:
    """One kernel to time.

    ``call(i)`` runs it on the ``i``-th of ``copies`` equal operands. Successive calls use
    successive operands, so that what a call reads has left the caches since it was last read.
    """

    call: Callable[[int], object]
    copies: int
    kernels: int = 1
    """Kernels that one call runs; times are per kernel."""
    prepare: Callable[[], object] = lambda: None
    """Run before every turn, outside of its time."""
    _next: int = field(default=0, repr=False)

    def turn(self, calls: int) -> None:
        for _ in range(calls):
            self.call(self._next)
            self._next = (self._next + 1) % self.copies


Key = TypeVar("Key", bound=Hashable)


def interleave(
    contenders: Mapping[Key, Contender],
    pace: Pace,
    clock: Callable[[], float],
    synchronize: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Time the contenders in turns.

    Parameters
    ----------
    contenders
        What to time, by name.
    pace
        Rounds and their length.
    clock
        Monotonic, seconds.
    synchronize
        Waits for the device; called before every reading of the clock.

    Returns
    -------
    dict
        Seconds per kernel of each contender, one value a round.
    """
    names = list(contenders)

    def turn(name: Key, calls: int) -> float:
        contenders[name].prepare()
        synchronize()
        began = clock()
        contenders[name].turn(calls)
        synchronize()
        return (clock() - began) / (calls * contenders[name].kernels)

    for name in names:
        turn(name, 1)
    kernels = {name: contenders[name].kernels for name in names}
    calls = {name: _calls(turn(name, 1) * kernels[name], pace.turn_s) for name in names}
    round_s = sum(turn(name, calls[name]) * calls[name] * kernels[name] for name in names)
    rounds = max(pace.min_rounds, min(pace.max_rounds, int(pace.row_s / max(round_s, 1e-9))))
    times: dict[Key, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        # The order turns, so that nobody always runs after the same neighbour.
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(turn(name, calls[name]))
    return times


def _calls(call_s: float, turn_s: float) -> int:
    return max(1, round(turn_s / max(call_s, 1e-9)))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Spread of the round-by-round ratio of two contenders."""
    return spread([one / other for one, other in zip(numerator, denominator, strict=True)])


def fastest(times: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Name of the contender with the smallest median."""
    return min(names, key=lambda name: float(np.median(times[name])))
