"""Pickers: from the costs of all replicas to an order of a few."""

from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dps_ray.fleet.columns import FloatArray, TierArray
from dps_ray.fleet.routing import Tier

Rows = NDArray[np.intp]
_TIER_STEP = 1000.0
_TIE = 1e-9


class Picker(Protocol):
    """Order the candidates; stateful, one for each router."""

    def pick(
        self, tiers: TierArray, costs: FloatArray, limit: int, rng: np.random.Generator
    ) -> Rows:
        """At most ``limit`` rows, most wanted first, none of them excluded."""
        ...


class Lowest:
    """By tier, then by cost; equals, to a billionth, at random."""

    def pick(
        self, tiers: TierArray, costs: FloatArray, limit: int, rng: np.random.Generator
    ) -> Rows:
        # One key for both: a cost above the step would reach into the next tier.
        keys = tiers * _TIER_STEP + np.minimum(costs, _TIER_STEP - 1.0)
        keys += _TIE * rng.random(len(keys))
        if limit < len(keys):
            rows = np.argpartition(keys, limit)[:limit]
            rows = rows[np.argsort(keys[rows])]
        else:
            rows = np.argsort(keys)
        return rows[tiers[rows] != Tier.EXCLUDED]


class Drawn:
    """A few drawn at random, the best of them first, the rest at random: the usual baseline."""

    def __init__(self, choices: int) -> None:
        self._choices = choices

    def pick(
        self, tiers: TierArray, costs: FloatArray, limit: int, rng: np.random.Generator
    ) -> Rows:
        rows = rng.permutation(np.flatnonzero(tiers != Tier.EXCLUDED))[: max(limit, self._choices)]
        drawn = rows[: self._choices]
        order = np.lexsort((costs[drawn], tiers[drawn]))
        return np.concatenate((drawn[order], rows[self._choices :]))[:limit]


class Rotating:
    """One after the other, whatever they cost."""

    def __init__(self) -> None:
        self._next = 0

    def pick(
        self, tiers: TierArray, costs: FloatArray, limit: int, rng: np.random.Generator
    ) -> Rows:
        rows = np.flatnonzero(tiers != Tier.EXCLUDED)
        if not len(rows):
            return rows
        rows = np.roll(rows, -(self._next % len(rows)))
        self._next += 1
        return rows[np.argsort(tiers[rows], kind="stable")][:limit]


class Probe(BaseModel):
    """A few requests for replicas of which nothing is known, so that they are not avoided for ever.

    A restoring replica is never probed: it says by itself when it is back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.01
    """Share of requests without a floor that go to a replica of the unknown tier first, while
    there is one and there are known replicas too."""

    def choose(self, tiers: TierArray, rng: np.random.Generator) -> int | None:
        """Row to try first, or ``None`` for the usual order."""
        if self.share == 0.0 or rng.random() >= self.share:
            return None
        unknown = np.flatnonzero(tiers == Tier.UNKNOWN)
        if not len(unknown) or tiers.min() >= Tier.UNKNOWN:
            return None
        return int(rng.choice(unknown))
