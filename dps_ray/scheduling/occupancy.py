"""How KV occupancy moves from one period to the next: fitted to a run, or described.

Every kernel here is stochastically monotone: a fuller cache is likelier to be full next. That is
what the model of ``mdp.py`` asks for.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def random_walk(
    levels: int, *, up: float, down: float, burst: float = 0.0, burst_levels: int = 0
) -> Floats:
    """A walk that moves one level up or down a period, with rare jumps up.

    Parameters
    ----------
    levels
        Number of occupancy levels; the walk stops at both ends.
    up, down, burst
        Chances of one level up, one level down, and a jump; at most 1 together.
    burst_levels
        Height of a jump, levels.

    Raises
    ------
    ValueError
        When the chances are no distribution.
    """
    if min(up, down, burst) < 0.0 or up + down + burst > 1.0:
        raise ValueError(f"up {up}, down {down} and burst {burst} are no chances that sum to 1")
    steps = [(1, up), (-1, down), (burst_levels, burst), (0, 1.0 - up - down - burst)]
    kernel = np.zeros((levels, levels))
    for level in range(levels):
        for step, chance in steps:
            kernel[level, min(max(level + step, 0), levels - 1)] += chance
    return kernel


def fitted_walk(levels: int, series: Sequence[Sequence[float]]) -> Floats:
    """The walk ``next = a * level + b + noise`` that fits measured occupancy best.

    ``a`` lies in 0 to 1 and the noise is the measured one, the same at every level: occupancy that
    a run never reached moves as the rest does.

    Parameters
    ----------
    levels
        Number of occupancy levels.
    series
        Occupancy in levels at equal distances of time, one sequence a replica.

    Raises
    ------
    ValueError
        When there are fewer than two readings in a row.
    """
    now = np.concatenate([np.asarray(one[:-1], dtype=np.float64) for one in series])
    after = np.concatenate([np.asarray(one[1:], dtype=np.float64) for one in series])
    if not now.size:
        raise ValueError("occupancy has fewer than two readings in a row: sample a longer run")
    spread = float(np.var(now))
    slope = float(np.mean((now - now.mean()) * (after - after.mean()))) / spread if spread else 0.0
    slope = min(max(slope, 0.0), 1.0)
    shift = float(after.mean()) - slope * float(now.mean())
    noise = after - slope * now - shift
    kernel = np.zeros((levels, levels))
    for level in range(levels):
        reached = np.clip(np.rint(slope * level + shift + noise), 0, levels - 1).astype(np.intp)
        kernel[level] = np.bincount(reached, minlength=levels) / noise.size
    return kernel
