"""A routing decision and what it was made of: the reasons are worked out only when asked for."""

from dataclasses import dataclass

from dps_ray.fleet.columns import FloatArray, TierArray
from dps_ray.fleet.routing import Reason, Term, Tier


@dataclass(frozen=True, slots=True)
class Line:
    """One scorer's values as ``base + slope * open requests``, for every candidate."""

    scorer: str
    weight: float
    base: FloatArray
    slope: FloatArray | None = None

    def at(self, open_requests: FloatArray) -> FloatArray:
        return self.base if self.slope is None else self.base + self.slope * open_requests


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
    open_requests: FloatArray
    """The router's requests on each candidate at that moment."""

    def reasons(self) -> tuple[Reason, ...]:
        """Filters and terms of every candidate, best tier and lowest cost first.

        Takes some microseconds for each candidate.
        """
        values = [(line, line.at(self.open_requests)) for line in self.lines]
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
