"""Scorers: what a request would cost on each replica, from one point of view each.

A value of 0 is best and 1 is bad; the policy adds the values times their weights. What depends on
requests in flight only in proportion (``SteadyScorer``) is worked out once per version of the
columns; the others run at every decision.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, ClassVar, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.columns import (
    FAST,
    NO_MODE,
    Columns,
    FloatArray,
    TierArray,
    take_the_mean,
)
from dps_ray.fleet.routing import Tier

Weight = Annotated[float, Field(ge=0.0)]
Matches = Mapping[str, float]
"""Share of the request's prefix cached on a replica, by replica id; missing is none."""


class Scorer(Protocol):
    """Cost of a request on every replica, from one point of view."""

    name: ClassVar[str]
    weight: float

    def values(
        self, columns: Columns, ask: Ask, tiers: TierArray, matches: Matches
    ) -> FloatArray | None:
        """One value for each row; ``None`` where the request gives nothing to go by."""
        ...


class _Weighted(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SteadyScorer(_Weighted):
    """A scorer whose values are ``base + slope * open requests`` until the columns change."""

    name: ClassVar[str]
    weight: Weight

    def line(self, columns: Columns, tiers: TierArray) -> tuple[FloatArray, FloatArray | None]:
        """``base`` and ``slope`` of every row; no slope where open requests do not matter."""
        raise NotImplementedError

    def values(
        self, columns: Columns, ask: Ask, tiers: TierArray, matches: Matches
    ) -> FloatArray | None:
        base, slope = self.line(columns, tiers)
        return base if slope is None else base + slope * columns.open_requests


class Precision(SteadyScorer):
    """Being in fast mode: how much headroom full precision is worth.

    A replica of unknown mode counts as the others of its tier do on average.
    """

    name: ClassVar[str] = "mode"
    weight: Weight = 0.25
    """Cost of fast mode. 0.25: a replica in full mode is preferred until it has a quarter of its
    memory less to offer than one in fast mode."""

    def line(self, columns: Columns, tiers: TierArray) -> tuple[FloatArray, FloatArray | None]:
        fast = (columns.mode == FAST).astype(np.float64)
        take_the_mean(fast, np.flatnonzero(columns.mode == NO_MODE), tiers)
        return fast, None


class Headroom(SteadyScorer):
    """KV memory left once all known requests hold theirs, as a share of all KV memory.

    Headroom is what the replica reported, lendable units included, less what its waiting requests
    and those placed since will take at the mean size of its running ones; the value is 1 less that
    share. In a tier where some replica does not know its headroom, or how many wait for it, every
    value is 0: an unknown must neither win nor lose against a figure.
    """

    name: ClassVar[str] = "headroom"
    weight: Weight = 1.0
    """Cost of a replica without any headroom."""
    blocks_per_request: Annotated[float, Field(gt=0.0)] = 8.0
    """KV blocks assumed for a request while a replica has none running to take the mean of."""

    def line(self, columns: Columns, tiers: TierArray) -> tuple[FloatArray, FloatArray | None]:
        blocks = columns.request_blocks
        size = np.where(np.isnan(blocks), self.blocks_per_request, blocks)
        coming = columns.waiting - columns.open_when_measured
        used_up = 1.0 - (columns.headroom_blocks - coming * size) / columns.total_blocks
        blind = np.zeros(len(Tier), dtype=bool)
        blind[tiers[np.isnan(used_up)]] = True
        ignored = blind[tiers]
        return (
            np.where(ignored, 0.0, used_up),
            np.where(ignored, 0.0, size / columns.total_blocks),
        )


class Queue(_Weighted):
    """Requests running and waiting on the replica. The value is their number, without a worst.

    Where that is unknown the mean of those known in the tier stands for the requests of others.
    """

    name: ClassVar[str] = "queue"
    weight: Weight = 0.02
    """Cost of each request: 50 requests weigh as much as all of a replica's memory."""

    def values(
        self, columns: Columns, ask: Ask, tiers: TierArray, matches: Matches
    ) -> FloatArray | None:
        return columns.loads(tiers)


class PrefixAffinity(_Weighted):
    """Share of the prompt's leading chunks that this router has not sent to the replica lately."""

    name: ClassVar[str] = "prefix"
    weight: Weight = 0.15
    """Cost of a replica that has none of the prompt cached."""

    def values(
        self, columns: Columns, ask: Ask, tiers: TierArray, matches: Matches
    ) -> FloatArray | None:
        if not matches:
            return None
        values = np.ones(len(columns))
        for replica_id, share in matches.items():
            row = columns.index.get(replica_id)
            if row is not None:
                values[row] = 1.0 - share
        return values


class Session(_Weighted):
    """Every replica but the one that the request's session belongs to.

    That one is found by rendezvous hashing among the best tier: all routers agree on it without
    talking to each other, and when a replica leaves only its own sessions move.
    """

    name: ClassVar[str] = "session"
    weight: Weight = 0.2
    """Cost of leaving the session's replica."""

    def values(
        self, columns: Columns, ask: Ask, tiers: TierArray, matches: Matches
    ) -> FloatArray | None:
        if ask.session is None or not len(columns):
            return None
        digest = int.from_bytes(blake2b(ask.session.encode(), digest_size=8).digest())
        # Multiplicative hashing: an odd factor drawn by the session shuffles the identities.
        ranks = columns.identity * np.uint64(digest | 1)
        ranks[tiers != tiers.min()] = 0
        values = np.ones(len(columns))
        values[ranks.argmax()] = 0.0
        return values


class Locality(SteadyScorer):
    """Being on another node than the router. Off by default: a hop costs less than a token."""

    name: ClassVar[str] = "locality"
    weight: Weight = 0.0
    """Cost of another node."""

    def line(self, columns: Columns, tiers: TierArray) -> tuple[FloatArray, FloatArray | None]:
        return np.where(columns.local, 0.0, 1.0), None
