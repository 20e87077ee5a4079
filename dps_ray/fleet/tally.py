"""What one router has decided: counts, a recent example with its reasons, and the dry run."""

import time
from collections.abc import Callable, Collection, Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.columns import Columns
from dps_ray.fleet.decision import Decision, Matches
from dps_ray.fleet.pipeline import Pipeline
from dps_ray.fleet.policies import Policy
from dps_ray.fleet.recent import Kept, RecentDecisions, Told


class DryRun(BaseModel):
    """A policy that decides beside the live one and moves no request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Policy
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of decisions that it also makes."""


class DryRunFigures(BaseModel):
    """How a dry run compares. Regret is in the cost units of the policy that judges: what that
    policy thinks is lost by following the other, on average, where both picks are of one tier."""

    policy: str
    compared: int = 0
    agreed: int = 0
    worse_tier: int = 0
    """Dry-run picks that are of a worse tier in the live policy's eyes."""
    better_tier: int = 0
    """Live picks that are of a worse tier in the dry-run policy's eyes."""
    live_regret: float = 0.0
    """The live policy's opinion of the dry run's picks; never below 0."""
    dry_run_regret: float = 0.0
    """The dry-run policy's opinion of the live picks; never below 0."""


class RouterReport(BaseModel):
    """What a router tells the controller about itself, about once a second."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    router_id: str
    application: str | None = None
    """Application whose replicas it routes to; ``None`` from a release that does not tell."""
    node_id: str | None
    policy: str
    version: int | None
    """Publication that it decides on."""
    offered: tuple[str, ...] = ()
    """Replicas that Serve offers it. One that Serve offers no longer is on its way out."""
    decisions: int = 0
    probes: int = 0
    blind: int = 0
    """Decisions made without one live replica, on Serve's own statistics."""
    unplaced: int = 0
    """Decisions for which every replica was excluded."""
    picks: dict[str, int] = {}
    """First choices by replica since the router started."""
    dry_run: DryRunFigures | None = None
    example: Told | None = None
    """The first decision since the last report, cut to the best and some left out."""
    found: tuple[Told, ...] = ()
    """Decisions that somebody has asked for."""


class RouterTally:
    """Counts of one router since it started.

    Parameters
    ----------
    wall_clock
        Seconds since the epoch, for people.
    """

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._decisions = self._probes = self._blind = self._unplaced = 0
        self._picks: dict[str, int] = {}
        self._figures: DryRunFigures | None = None
        self._example: Kept | None = None
        self._recent = RecentDecisions()
        self._found: list[Told] = []

    def note(
        self, decision: Decision, ask: Ask, *, policy: str, blind: bool, request_id: str | None
    ) -> None:
        """Count and keep a decision."""
        self._decisions += 1
        self._probes += decision.probe
        self._blind += blind
        if decision.order:
            self._picks[decision.order[0]] = self._picks.get(decision.order[0], 0) + 1
        else:
            self._unplaced += 1
        kept = Kept(self._wall_clock(), policy, ask, decision)
        self._example = self._example or kept
        if request_id is not None:
            self._recent.note(request_id, kept)

    def accepted(self, request_id: str, replica_id: str) -> None:
        """A replica has taken a request."""
        self._recent.accepted(request_id, replica_id)

    def look_up(self, request_ids: Iterable[str]) -> bool:
        """Put the decisions about these requests into the next report; whether any is kept."""
        found = [told for name in request_ids if (told := self._recent.find(name)) is not None]
        self._found += found
        return bool(found)

    def start_dry_run(self, policy: str | None) -> None:
        """Begin to compare with a policy, or stop comparing."""
        self._figures = DryRunFigures(policy=policy) if policy is not None else None

    def compare(
        self,
        decision: Decision,
        columns: Columns,
        ask: Ask,
        matches: Matches,
        live: Pipeline,
        dry_run: Pipeline,
    ) -> None:
        """Let the dry run decide too and note what each policy thinks of the other's pick."""
        figures = self._figures
        assert figures is not None, "a dry run has begun"
        chosen = decision.order[:1]
        other = dry_run.decide(columns, ask, matches, limit=1).order
        if not chosen or not other or decision.probe:
            return
        figures.compared += 1
        figures.agreed += chosen == other
        mine, theirs = columns.index[chosen[0]], columns.index[other[0]]
        tiers, costs = live.costs(columns, ask, matches)
        figures.worse_tier += bool(tiers[theirs] > tiers[mine])
        regret = float(costs[theirs] - costs[mine]) if tiers[theirs] == tiers[mine] else 0.0
        figures.live_regret += (max(0.0, regret) - figures.live_regret) / figures.compared
        tiers, costs = dry_run.costs(columns, ask, matches)
        figures.better_tier += bool(tiers[mine] > tiers[theirs])
        regret = float(costs[mine] - costs[theirs]) if tiers[theirs] == tiers[mine] else 0.0
        figures.dry_run_regret += (max(0.0, regret) - figures.dry_run_regret) / figures.compared

    def report(
        self,
        *,
        router_id: str,
        application: str | None,
        node_id: str | None,
        policy: str,
        version: int | None,
        offered: tuple[str, ...],
    ) -> RouterReport:
        """The counts, and the example and what was looked up since the last report."""
        example, self._example = self._example, None
        found, self._found = self._found, []
        return RouterReport(
            router_id=router_id,
            application=application,
            node_id=node_id,
            policy=policy,
            version=version,
            offered=offered,
            decisions=self._decisions,
            probes=self._probes,
            blind=self._blind,
            unplaced=self._unplaced,
            picks=dict(self._picks),
            dry_run=self._figures.model_copy() if self._figures is not None else None,
            example=example.brief() if example is not None else None,
            found=tuple(found),
        )

    def retain(self, replica_ids: Collection[str]) -> None:
        """Drop the picks of replicas that Serve no longer offers."""
        self._picks = {name: count for name, count in self._picks.items() if name in replica_ids}
