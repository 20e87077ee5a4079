"""The tier of every candidate, and what follows from it until the columns change."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dps_ray.fleet.routing import Tier

TierArray = NDArray[np.int8]
RowArray = NDArray[np.intp]
FloatArray = NDArray[np.float64]

STEP = 1000.0
"""A tier's lead over the next, in units of cost."""
# Plain numbers: numpy takes microseconds to make one of an ``IntEnum``.
_UNKNOWN, _EXCLUDED = int(Tier.UNKNOWN), int(Tier.EXCLUDED)


class Tiers:
    """Tiers by row; everything else is worked out when it is first asked for.

    Parameters
    ----------
    levels
        One tier for each row; not changed afterwards.
    """

    def __init__(self, levels: TierArray) -> None:
        self.levels = levels

    @cached_property
    def usable(self) -> RowArray:
        """Rows that may get the request."""
        return np.flatnonzero(self.levels != _EXCLUDED)

    @cached_property
    def unknown(self) -> RowArray:
        """Rows of the unknown tier."""
        return np.flatnonzero(self.levels == _UNKNOWN)

    @cached_property
    def best(self) -> int:
        """The best tier there is."""
        return int(self.levels.min())

    @cached_property
    def steps(self) -> FloatArray:
        """What to add to costs below ``STEP`` to sort by tier first; excluded rows come last."""
        return np.where(self.levels == _EXCLUDED, np.inf, self.levels * STEP)

    @cached_property
    def _counts(self) -> NDArray[np.intp]:
        """Rows of each tier."""
        return np.bincount(self.levels, minlength=len(Tier))

    def fill(self, values: FloatArray, unknown: RowArray) -> None:
        """Put the mean of the known values of a tier in the place of its unknown ones.

        So an unknown neither wins nor loses against a figure. In a tier without any it is 0.

        Parameters
        ----------
        values
            One for each row; changed in place.
        unknown
            Rows of the unknown ones.
        """
        if not len(unknown):
            return
        values[unknown] = 0.0
        of_unknown = self.levels[unknown]
        sums = np.bincount(self.levels, weights=values, minlength=len(Tier))
        known = self._counts - np.bincount(of_unknown, minlength=len(Tier))
        values[unknown] = (sums / np.maximum(known, 1))[of_unknown]
