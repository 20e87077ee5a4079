"""Which replica gets a request: what a policy sees, and what it answers.

A policy is a pure function of the candidates. It orders all of them and drops none: when every
replica is in a bad way, the least bad one still serves.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from dps_ray.fleet.snapshot import Entry, Standing
from dps_ray.modes import Mode


class Tier(IntEnum):
    """Classes of replicas, best first. A request leaves a tier only when all of it refuses."""

    READY = 0
    UNKNOWN = 1
    """Cold or stale: nothing speaks against it, nothing for it."""
    RESTORING = 2
    """New work takes the memory that the restore needs and starts it over."""
    DRAINING = 3
    DEAD = 4


@dataclass(frozen=True, slots=True)
class Hint:
    """What Serve's own routing statistics say about a replica: coarse, and of unknown age."""

    mode: Mode | None = None
    restoring: bool | None = None
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica that a request can go to, as this router sees it."""

    entry: Entry
    placed_since: int = 0
    """Requests this router has placed on it, less those that finished, since the state was
    measured."""
    open_requests: int = 0
    """Requests of this router that are on it now."""
    queue_len: int | None = None
    """Ongoing requests as Serve's router last heard."""
    hint: Hint | None = None

    @property
    def replica_id(self) -> str:
        return self.entry.replica_id


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a replica stands where it does in an order."""

    replica_id: str
    tier: Tier
    cost: float
    """Lower is better within the tier."""
    terms: tuple[tuple[str, float], ...]
    """The parts the cost is the sum of."""


@dataclass(frozen=True, slots=True)
class Decision:
    """All candidates, most wanted first."""

    order: tuple[str, ...]
    reasons: tuple[Reason, ...]
    """In the same order."""


class RoutingPolicy(Protocol):
    """Order the candidates of one request."""

    def decide(self, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
        """Return every candidate exactly once; ``rng`` breaks ties."""
        ...


def tier_of(candidate: Candidate) -> Tier:
    """Class of a candidate by its pushed state, or by Serve's statistics where that is missing."""
    entry, hint = candidate.entry, candidate.hint
    if entry.standing is Standing.DEAD:
        return Tier.DEAD
    if entry.standing is Standing.DRAINING:
        return Tier.DRAINING
    if entry.standing is Standing.LIVE:
        assert entry.state is not None, "a live entry has a state"
        return Tier.RESTORING if entry.state.restoring else Tier.READY
    if hint is not None and hint.dead:
        return Tier.DEAD
    if hint is not None and hint.restoring:
        return Tier.RESTORING
    return Tier.UNKNOWN


def load_of(candidate: Candidate) -> int:
    """Requests on the replica: reported, corrected by this router's own; else the best known."""
    entry = candidate.entry
    if entry.standing is Standing.LIVE and entry.state is not None:
        running, waiting = entry.state.running, entry.state.waiting
        if running is not None and waiting is not None:
            return max(running + waiting + candidate.placed_since, candidate.open_requests, 0)
    return max(candidate.queue_len or 0, candidate.open_requests)


def by_tier_and_cost(
    candidates: Sequence[Candidate],
    tiers: Sequence[Tier],
    terms: Sequence[tuple[tuple[str, float], ...]],
    rng: random.Random,
) -> Decision:
    """Order by tier, then by the sum of the terms; equals in random order."""
    rows = []
    for candidate, tier, parts in zip(candidates, tiers, terms, strict=True):
        reason = Reason(candidate.replica_id, tier, sum(value for _, value in parts), parts)
        rows.append(((tier, reason.cost, rng.random()), reason))
    rows.sort(key=lambda row: row[0])
    reasons = tuple(reason for _, reason in rows)
    return Decision(order=tuple(reason.replica_id for reason in reasons), reasons=reasons)
