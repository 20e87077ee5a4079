"""Scorers: what a request would cost on each replica, from one point of view each.

A value of 0 is best and 1 is bad; the policy adds the values times their weights. A scorer works
its ``Line`` out once per version of the columns; at a decision it only says which few rows are
different for that request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.columns import FAST, NO_MODE, Columns
from dps_ray.fleet.decision import Line, Matches, Spots
from dps_ray.fleet.routing import Tier
from dps_ray.fleet.tiers import RowArray, Tiers

Weight = Annotated[float, Field(ge=0.0)]


class Scorer(Protocol):
    """Cost of a request on every replica, from one point of view."""

    name: ClassVar[str]
    weight: float

    def line(self, columns: Columns, tiers: Tiers) -> Line:
        """The values of every row until the columns change."""
        ...


class _Weighted(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Precision(_Weighted):
    """Being in fast mode: how much headroom full precision is worth.

    A replica of unknown mode counts as the others of its tier do on average.
    """

    name: ClassVar[str] = "mode"
    weight: Weight = 0.25
    """Cost of fast mode. 0.25: a replica in full mode is preferred until it has a quarter of its
    memory less to offer than one in fast mode."""

    def line(self, columns: Columns, tiers: Tiers) -> Line:
        fast = (columns.mode == FAST).astype(np.float64)
        tiers.fill(fast, np.flatnonzero(columns.mode == NO_MODE))
        return Line(self.name, self.weight, fast)


class Headroom(_Weighted):
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

    def line(self, columns: Columns, tiers: Tiers) -> Line:
        blocks = columns.request_blocks
        size = np.where(np.isnan(blocks), self.blocks_per_request, blocks)
        coming = columns.waiting - columns.open_when_measured
        used_up = 1.0 - (columns.headroom_blocks - coming * size) / columns.total_blocks
        blind = np.zeros(len(Tier), dtype=bool)
        blind[tiers.levels[np.isnan(used_up)]] = True
        ignored = blind[tiers.levels]
        return Line(
            self.name,
            self.weight,
            np.where(ignored, 0.0, used_up),
            np.where(ignored, 0.0, size / columns.total_blocks),
        )


class Queue(_Weighted):
    """Requests running and waiting on the replica. The value is their number, without a worst.

    A replica reports its queue now and then; this router knows at once what it has sent there
    since, and a replica never has fewer requests than this router has open on it. Where a replica
    does not know its queue the length that Serve has heard counts; where that is missing too, the
    mean of the others' requests known in the tier stands for them.
    """

    name: ClassVar[str] = "queue"
    weight: Weight = 0.02
    """Cost of each request: 50 requests weigh as much as all of a replica's memory."""

    def line(self, columns: Columns, tiers: Tiers) -> Line:
        others = np.maximum(columns.reported - columns.open_when_measured, 0.0)
        unknown = np.flatnonzero(np.isnan(others))
        tiers.fill(others, unknown)
        slope = np.ones(len(columns))
        return _QueueLine(
            self.name,
            self.weight,
            others,
            slope,
            columns=columns,
            tiers=tiers,
            unknown=unknown,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueueLine(Line):
    columns: Columns
    tiers: Tiers
    unknown: RowArray
    """Rows of replicas that do not know their queue."""

    def spots(self, ask: Ask, matches: Matches) -> Spots | None:
        if not len(self.unknown):
            return None
        heard = self.columns.queue_len[self.unknown]
        missing = np.isnan(heard)
        if missing.all():
            return None
        others = self.base.copy()
        others[self.unknown] = np.maximum(heard - self.columns.open_requests[self.unknown], 0.0)
        self.tiers.fill(others, self.unknown[missing])
        return Spots(self.unknown, others[self.unknown] - self.base[self.unknown])


class PrefixAffinity(_Weighted):
    """Share of the prompt's leading chunks that this router has not sent to the replica lately."""

    name: ClassVar[str] = "prefix"
    weight: Weight = 0.15
    """Cost of a replica that has none of the prompt cached."""

    def line(self, columns: Columns, tiers: Tiers) -> Line:
        return _PrefixLine(self.name, self.weight, np.ones(len(columns)), index=columns.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefixLine(Line):
    for_all: ClassVar[bool] = False
    index: Mapping[str, int]

    def spots(self, ask: Ask, matches: Matches) -> Spots | None:
        if not matches:
            return None
        found = [
            (self.index[name], -share) for name, share in matches.items() if name in self.index
        ]
        return Spots(
            np.array([row for row, _ in found], dtype=np.intp),
            np.array([change for _, change in found]),
        )


class Session(_Weighted):
    """Every replica but the one that the request's session belongs to.

    That one is found by rendezvous hashing among the best tier: all routers agree on it without
    talking to each other, and when a replica leaves only its own sessions move.
    """

    name: ClassVar[str] = "session"
    weight: Weight = 0.2
    """Cost of leaving the session's replica."""

    def line(self, columns: Columns, tiers: Tiers) -> Line:
        best = np.flatnonzero(tiers.levels == tiers.best) if len(columns) else tiers.usable
        return _SessionLine(
            self.name,
            self.weight,
            np.ones(len(columns)),
            rows=best,
            identities=columns.identity[best],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SessionLine(Line):
    for_all: ClassVar[bool] = False
    rows: RowArray
    """The best tier, and a number of each replica in it."""
    identities: NDArray[np.uint64]

    def spots(self, ask: Ask, matches: Matches) -> Spots | None:
        if ask.session is None or not len(self.rows):
            return None
        digest = int.from_bytes(blake2b(ask.session.encode(), digest_size=8).digest())
        # Multiplicative hashing: an odd factor drawn by the session shuffles the identities.
        owner = (self.identities * np.uint64(digest | 1)).argmax()
        return Spots(self.rows[owner : owner + 1], _OWNED)


_OWNED = np.array([-1.0])


class Locality(_Weighted):
    """Being on another node than the router. Off by default: a hop costs less than a token."""

    name: ClassVar[str] = "locality"
    weight: Weight = 0.0
    """Cost of another node."""

    def line(self, columns: Columns, tiers: Tiers) -> Line:
        return Line(self.name, self.weight, np.where(columns.local, 0.0, 1.0))
