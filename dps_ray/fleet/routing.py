"""Words of a routing decision: tiers, reasons, and the replicas to choose among."""

from dataclasses import dataclass
from enum import IntEnum

from dps_ray.modes import Mode


class Tier(IntEnum):
    """Classes of replicas, best first. A request leaves a tier only when all of it refuses."""

    READY = 0
    FAST = 1
    """Fast mode, where full mode is asked for but not insisted on."""
    UNKNOWN = 2
    """Cold or stale: nothing speaks against it, nothing for it."""
    RESTORING = 3
    """New work takes the memory that the restore needs and starts it over."""
    EXCLUDED = 4
    """Gets no request: dead, draining, or not of the precision the request insists on."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What Serve's own routing statistics say about a replica: coarse, and of unknown age."""

    mode: Mode | None = None
    restoring: bool | None = None
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica that Serve offers, with what Serve knows about it."""

    replica_id: str
    node_id: str | None = None
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One scorer's part in a replica's cost."""

    scorer: str
    value: float
    """0 is best; 1 is the worst of scorers that have a worst."""
    weight: float

    @property
    def cost(self) -> float:
        """The part itself."""
        return self.value * self.weight


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a replica stands where it does."""

    replica_id: str
    tier: Tier
    demoted_by: tuple[tuple[str, Tier], ...]
    """Filters that moved it down, and how far each did."""
    terms: tuple[Term, ...]

    @property
    def cost(self) -> float:
        """Sum of the terms; lower is better within a tier."""
        return sum(term.cost for term in self.terms)
