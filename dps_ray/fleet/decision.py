"""A routing decision and what it was made of: the reasons are worked out only when asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.routing import Reason, Term, Tier
from dps_ray.fleet.tiers import FloatArray, RowArray, TierArray

Matches = Mapping[str, float]
"""Share of the request's prefix cached on a replica, by replica id; missing is none."""


class Spots(NamedTuple):
    """A few different rows, and what is added to their values for one request."""

    rows: RowArray
    changes: FloatArray


@dataclass(frozen=True, slots=True)
class Line:
    """One scorer's values as ``base + slope * open requests``, for every candidate.

    They hold until the columns change; the few that do not are the request's ``spots``.
    """

    for_all: ClassVar[bool] = True
    """The scorer has a say in every request, not only in those with spots."""
    scorer: str
    weight: float
    base: FloatArray
    slope: FloatArray | None = None

    def spots(self, ask: Ask, matches: Matches) -> Spots | None:
        """What is different for this request, at this moment."""
        return None

    def at(self, open_requests: FloatArray, spots: Spots | None) -> FloatArray:
        """The values."""
        values = self.base.copy()
        if self.slope is not None:
            values += self.slope * open_requests
        if spots is not None:
            values[spots.rows] += spots.changes
        return values


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas for one request, most wanted first.

    All arrays are those that the decision was computed from: keeping them costs no time.
    """

    order: tuple[str, ...]
    """At most as many as were asked for; empty when every replica is excluded."""
    probe: bool
    """The first replica was taken to learn about it, against the order of the others."""
    candidates: tuple[str, ...]
    tiers: TierArray
    verdicts: tuple[tuple[str, TierArray], ...]
    """Tiers in the eyes of each filter."""
    lines: tuple[Line, ...]
    spots: Mapping[str, Spots]
    """By scorer."""
    open_requests: FloatArray
    """The router's requests on each candidate at that moment."""

    def reasons(self) -> tuple[Reason, ...]:
        """Filters and terms of every candidate, best tier and lowest cost first.

        Takes some microseconds for each candidate.
        """
        values = [
            (line, line.at(self.open_requests, self.spots.get(line.scorer)))
            for line in self.lines
            if line.for_all or line.scorer in self.spots
        ]
        reasons = [
            Reason(
                replica_id=replica_id,
                tier=Tier(int(self.tiers[row])),
                demoted_by=tuple(
                    (name, Tier(int(levels[row]))) for name, levels in self.verdicts if levels[row]
                ),
                terms=tuple(
                    Term(line.scorer, float(column[row]), line.weight) for line, column in values
                ),
            )
            for row, replica_id in enumerate(self.candidates)
        ]
        return tuple(sorted(reasons, key=lambda reason: (reason.tier, reason.cost)))
