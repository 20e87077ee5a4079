"""Filters: which replicas a request should not get, and how bad it would be if it had to.

A filter demotes to a tier rather than dropping: when every replica is in a bad way the least bad
one still serves. Only ``Tier.EXCLUDED`` is final, for replicas that would fail the request.
"""

from typing import ClassVar, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.columns import FAST, FULL, BoolArray, Columns
from dps_ray.fleet.routing import Tier
from dps_ray.fleet.tiers import TierArray
from dps_ray.modes import Floor


class Filter(Protocol):
    """Tier of every replica in the eyes of one rule; the worst of all filters counts."""

    name: ClassVar[str]

    def tiers(self, columns: Columns, ask: Ask) -> TierArray:
        """One tier for each row; may depend on ``ask.floor`` but on nothing else of the request."""
        ...


class _Rule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Health(_Rule):
    """Dead and draining replicas get nothing: the one fails requests, the other would never end."""

    name: ClassVar[str] = "health"

    def tiers(self, columns: Columns, ask: Ask) -> TierArray:
        return _demoted(columns.gone, Tier.EXCLUDED)


class Freshness(_Rule):
    """Cold and stale replicas come after those that are known to be well."""

    name: ClassVar[str] = "freshness"

    def tiers(self, columns: Columns, ask: Ask) -> TierArray:
        return _demoted(~columns.live, Tier.UNKNOWN)


class Restoring(_Rule):
    """Replicas whose residual is on its way back are left alone as long as others serve."""

    name: ClassVar[str] = "restoring"

    def tiers(self, columns: Columns, ask: Ask) -> TierArray:
        return _demoted(columns.restoring, Tier.RESTORING)


class PrecisionFloor(_Rule):
    """The precision that the request, or the policy, asks for.

    ``full`` excludes replicas known to be in fast mode; those of unknown mode stay candidates,
    because the engine itself holds such a request back until it is in full mode.
    """

    name: ClassVar[str] = "floor"
    at_least: Floor = Floor.ANY
    """Floor of requests that ask for less."""

    def tiers(self, columns: Columns, ask: Ask) -> TierArray:
        floors = {self.at_least, ask.floor}
        if floors == {Floor.ANY}:
            return np.full(len(columns), Tier.READY, dtype=np.int8)
        fast = Tier.EXCLUDED if Floor.FULL in floors else Tier.FAST
        tiers = np.full(len(columns), Tier.UNKNOWN, dtype=np.int8)
        tiers[columns.mode == FULL] = Tier.READY
        tiers[columns.mode == FAST] = fast
        return tiers


def _demoted(rows: BoolArray, tier: Tier) -> TierArray:
    """That tier for the chosen rows, and the best for all others."""
    return rows * np.int8(tier)
