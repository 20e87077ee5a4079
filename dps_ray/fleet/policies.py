"""Routing policies and their parameters, which an operator can change while the fleet runs."""

import random
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dps_ray.fleet.routing import Candidate, Decision, Tier, by_tier_and_cost, load_of, tier_of
from dps_ray.fleet.snapshot import Standing
from dps_ray.modes import Mode

Weight = Annotated[float, Field(ge=0.0)]


class PowerOfTwo(BaseModel):
    """Two replicas drawn at random, the one with fewer requests first: the usual baseline.

    It knows nothing of modes and restores. Dead and draining replicas still come last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["power_of_two"] = "power_of_two"

    def decide(self, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order two drawn candidates by load; the others follow at random."""
        drawn = set(rng.sample(range(len(candidates)), k=min(2, len(candidates))))
        tiers, terms = [], []
        for index, candidate in enumerate(candidates):
            tier = tier_of(candidate)
            tiers.append(tier if tier >= Tier.DRAINING else Tier.READY)
            load = float(load_of(candidate)) if index in drawn else 0.0
            terms.append((("not_drawn", 0.0 if index in drawn else 1e9), ("load", load)))
        return by_tier_and_cost(candidates, tiers, terms, rng)


class ModeAware(BaseModel):
    """Leave restoring replicas alone; elsewhere go where most KV memory is left.

    The cost of a replica is ``headroom_weight * (1 - effective headroom share) + queue_weight *
    requests + fast_weight * [fast mode]``. Effective headroom is what the replica reported, less
    what its waiting requests and those placed since will take at the mean size of its running
    ones. A tier in which some replica does not know its headroom is ranked without that term: an
    unknown must neither win nor lose against a figure.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["mode_aware"] = "mode_aware"
    headroom_weight: Weight = 1.0
    """Cost of a replica without any headroom."""
    queue_weight: Weight = 0.02
    """Cost of each request on the replica: 50 requests weigh as much as all of its memory."""
    fast_weight: Weight = 0.25
    """Cost of being in fast mode: how much headroom full precision is worth."""
    blocks_per_request: Annotated[float, Field(gt=0.0)] = 8.0
    """KV blocks assumed for a request while a replica has none running to take the mean of."""

    def decide(self, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by tier, then by cost."""
        tiers = [tier_of(candidate) for candidate in candidates]
        shares = [self._effective_headroom_share(candidate) for candidate in candidates]
        blind = {tier for tier, share in zip(tiers, shares, strict=True) if share is None}
        terms = []
        for candidate, tier, share in zip(candidates, tiers, shares, strict=True):
            parts = [("queue", self.queue_weight * load_of(candidate))]
            if share is not None and tier not in blind:
                parts.append(("headroom", self.headroom_weight * (1.0 - share)))
            if _mode(candidate) is Mode.FAST:
                parts.append(("fast", self.fast_weight))
            terms.append(tuple(parts))
        return by_tier_and_cost(candidates, tiers, terms, rng)

    def _effective_headroom_share(self, candidate: Candidate) -> float | None:
        """Headroom left once all known requests hold memory; below 0 when it will not suffice."""
        entry = candidate.entry
        if entry.standing is not Standing.LIVE or entry.state is None:
            return None
        state = entry.state
        if state.headroom_blocks is None or not state.total_blocks:
            return None
        size = self.blocks_per_request
        if state.running and state.used_blocks is not None:
            size = state.used_blocks / state.running
        coming = (state.waiting or 0) + candidate.placed_since
        return (state.headroom_blocks - coming * size) / state.total_blocks


def _mode(candidate: Candidate) -> Mode | None:
    entry = candidate.entry
    if entry.standing is Standing.LIVE and entry.state is not None:
        return entry.state.mode
    return candidate.hint.mode if candidate.hint is not None else None


Policy = Annotated[PowerOfTwo | ModeAware, Field(discriminator="name")]
"""Any policy, chosen by its ``name``."""
