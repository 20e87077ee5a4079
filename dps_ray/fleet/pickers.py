"""Pickers: from the costs of all replicas to an order of a few."""

from typing import Annotated, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dps_ray.fleet.routing import Tier
from dps_ray.fleet.tiers import STEP, FloatArray, RowArray, Tiers

_TIE = 1e-9


class Picker(Protocol):
    """Order the candidates; stateful, one for each router."""

    def pick(
        self, tiers: Tiers, costs: FloatArray, limit: int, rng: np.random.Generator
    ) -> RowArray:
        """At most ``limit`` rows, most wanted first, none of them excluded."""
        ...


class Lowest:
    """By tier, then by cost; equals, to a billionth, at random."""

    def pick(
        self, tiers: Tiers, costs: FloatArray, limit: int, rng: np.random.Generator
    ) -> RowArray:
        keys = rng.random(len(costs))
        keys *= _TIE
        # One key for both: a cost above the step would reach into the next tier.
        keys += np.minimum(costs, STEP - 1.0)
        keys += tiers.steps
        limit = min(limit, len(tiers.usable))
        if limit < len(keys):
            rows = np.argpartition(keys, limit)[:limit]
            return rows[keys[rows].argsort()]
        return keys.argsort()


class Drawn:
    """A few drawn at random, the best of them first, the rest at random: the usual baseline."""

    def __init__(self, choices: int) -> None:
        self._choices = choices

    def pick(
        self, tiers: Tiers, costs: FloatArray, limit: int, rng: np.random.Generator
    ) -> RowArray:
        rows = rng.permutation(tiers.usable)[: max(limit, self._choices)]
        drawn = rows[: self._choices]
        order = np.lexsort((costs[drawn], tiers.levels[drawn]))
        return np.concatenate((drawn[order], rows[self._choices :]))[:limit]


class Rotating:
    """One after the other, whatever they cost."""

    def __init__(self) -> None:
        self._next = 0

    def pick(
        self, tiers: Tiers, costs: FloatArray, limit: int, rng: np.random.Generator
    ) -> RowArray:
        rows = tiers.usable
        if not len(rows):
            return rows
        rows = np.roll(rows, -(self._next % len(rows)))
        self._next += 1
        return rows[np.argsort(tiers.levels[rows], kind="stable")][:limit]


class Probe(BaseModel):
    """A few requests for replicas of which nothing is known, so that they are not avoided for ever.

    A restoring replica is never probed: it says by itself when it is back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.01
    """Share of requests without a floor that go to a replica of the unknown tier first, while
    there is one and there are known replicas too."""

    def choose(self, tiers: Tiers, rng: np.random.Generator) -> int | None:
        """Row to try first, or ``None`` for the usual order."""
        if self.share == 0.0 or rng.random() >= self.share:
            return None
        unknown = tiers.unknown
        if not len(unknown) or tiers.best >= Tier.UNKNOWN:
            return None
        return int(unknown[rng.integers(len(unknown))])
