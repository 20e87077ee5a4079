"""Where a request would go and why not elsewhere: the routers' own code on the controller's view.

What only a router knows is missing here, and the answer says so.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.policies import (
    FullFirst,
    LeastPressure,
    ModeAware,
    Policy,
    PowerOfTwo,
    RoundRobin,
)
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.routing import Peer, Reason, Tier
from dps_ray.fleet.snapshot import Entry, FleetSnapshot, FreshnessOptions
from dps_ray.fleet.tally import RouterReport
from dps_ray.fleet.view import FleetView
from dps_ray.modes import Floor

NOT_OFFERED = "not offered"
PROBE = "whether it is one of the {:.1%} of requests that try a replica of tier unknown first"
DRAWN = "whose turn it is, or which replicas are drawn: this policy goes by that before all costs"
NODE = "the node of the router (scorer locality): there are several"
DRAWING = tuple(kind().name for kind in (RoundRobin, PowerOfTwo))
MISSING = (
    "requests that a router has placed since the replicas reported; it adds them to queue and "
    "takes them off headroom",
    "prompts that a router has sent to a replica lately (scorer prefix)",
    "Serve's queue lengths and statistics, by which a router judges replicas that do not report",
)


class Candidate(BaseModel):
    """One replica and why it stands where it does."""

    replica_id: str
    place: int | None
    """From 1; ``None`` for one that gets no request."""
    tier: str
    why: str
    """In words, compared with the replica in the first place."""
    standing: str | None = None
    age_s: float | None = None
    offered_by: int | None = None
    """Routers that Serve lets send requests to it."""
    reason: Reason | None = None
    """Filters and terms; ``None`` for one that no router is offered."""


class Explanation(BaseModel):
    """Where a request would go by what the controller knows at this moment."""

    time_s: float
    """Wall clock, seconds since the epoch."""
    application: str
    policy: Policy
    floor: Floor
    session: bool
    routers: int
    """Routers of the application that report."""
    choice: str | None
    """The first replica; ``None`` when none may serve the request."""
    candidates: tuple[Candidate, ...]
    not_known: tuple[str, ...]
    """What may make a router decide otherwise."""


def explain(
    snapshot: FleetSnapshot,
    routers: Sequence[RouterReport],
    *,
    application: str,
    policy: Policy,
    freshness: FreshnessOptions,
    ask: Ask,
) -> Explanation:
    """Let a policy decide about one request of an application, and tell why.

    Parameters
    ----------
    snapshot
        All that the controller knows.
    routers
        Latest reports; those of other applications are left out.
    application
        Whose replicas are the candidates.
    policy
        The live policy or another one.
    freshness
        When a state is too old.
    ask
        The request.
    """
    routers = [router for router in routers if router.application == application]
    entries = {
        entry.replica_id: entry
        for entry in snapshot.entries
        if entry.state is not None and entry.state.application == application
    }
    offered = dict(Counter(name for router in routers for name in router.offered))
    missing = list(MISSING)
    if not routers:
        missing.append("which replicas Serve offers: no router of this application has reported")
        offered = dict.fromkeys(entries, 0)
    nodes = {router.node_id for router in routers}
    node_id = nodes.pop() if len(nodes) == 1 else None
    view = FleetView(np.random.default_rng(0), node_id)
    view.merge(Publication(snapshot=snapshot, routing=_calm(policy), freshness=freshness), 0.0)
    view.offer([Peer(name, _node_of(entries.get(name))) for name in sorted(offered)], 0.0)
    decision = view.decide(0.0, ask, limit=max(1, len(offered)))
    if isinstance(policy, LeastPressure | ModeAware | FullFirst) and ask.floor is Floor.ANY:
        missing.append(PROBE.format(policy.probe.share))
    if isinstance(policy, ModeAware | FullFirst) and policy.locality.weight and node_id is None:
        missing.append(NODE)
    drawn = policy.name in DRAWING
    if drawn:
        missing.append(DRAWN)
    order, reasons = decision.order, decision.reasons()
    known = {reason.replica_id for reason in reasons}
    candidates = ranked(order, reasons, drawn=drawn, entries=entries, offered=offered)
    candidates += [
        Candidate(
            replica_id=name,
            place=None,
            tier=NOT_OFFERED,
            why="gets nothing: Serve offers it to no router; it starts, stops or was found dead",
            standing=entry.standing.value,
            age_s=entry.age_s,
            offered_by=0,
        )
        for name, entry in sorted(entries.items())
        if name not in known
    ]
    return Explanation(
        time_s=time.time(),
        application=application,
        policy=policy,
        floor=ask.floor,
        session=ask.session is not None,
        routers=len(routers),
        choice=order[0] if order else None,
        candidates=tuple(candidates),
        not_known=tuple(missing),
    )


def ranked(
    order: Sequence[str],
    reasons: Sequence[Reason],
    *,
    drawn: bool,
    entries: Mapping[str, Entry] | None = None,
    offered: Mapping[str, int] | None = None,
) -> list[Candidate]:
    """All candidates of a decision with their places and why they have them.

    Parameters
    ----------
    order
        The replicas that were chosen, first choice first.
    reasons
        Of every candidate, best first.
    drawn
        The policy goes by turns or chance before it looks at costs.
    entries, offered
        What is known of them besides.
    """
    by_name = {reason.replica_id: reason for reason in reasons}
    best = by_name[order[0]] if order else None
    ahead = set(order)
    result = []
    for place, name in enumerate([*order, *(n for n in by_name if n not in ahead)], 1):
        reason, entry = by_name[name], (entries or {}).get(name)
        result.append(
            Candidate(
                replica_id=name,
                place=None if reason.tier is Tier.EXCLUDED else place,
                tier=reason.tier.name.lower(),
                why=why_there(reason, best, drawn=drawn),
                standing=entry.standing.value if entry is not None else None,
                age_s=entry.age_s if entry is not None else None,
                offered_by=(offered or {}).get(name),
                reason=reason,
            )
        )
    return result


def why_there(reason: Reason, best: Reason | None, *, drawn: bool) -> str:
    """In words: why a replica stands behind the first one.

    Parameters
    ----------
    reason
        Of the replica.
    best
        Of the one in the first place.
    drawn
        The policy goes by turns or chance before it looks at costs.
    """
    filters = ", ".join(name for name, tier in reason.demoted_by if tier is reason.tier)
    if reason.tier is Tier.EXCLUDED:
        return f"gets nothing: left out by filter {filters}"
    if best is None or reason.replica_id == best.replica_id:
        if reason.demoted_by:
            return f"first, although filter {filters} puts it into tier {reason.tier.name.lower()}"
        return "first: it was drawn" if drawn else "first: lowest cost of the best tier"
    if reason.tier is not best.tier:
        return (
            f"filter {filters} puts it into tier {reason.tier.name.lower()}, which comes after "
            f"{best.tier.name.lower()}: its turn is when all before it refuse"
        )
    if drawn:
        return "another was drawn"
    others = {term.scorer: term for term in best.terms}
    parts = [(term.cost - others[term.scorer].cost, term) for term in reason.terms]
    words = ", ".join(
        f"{term.scorer} {more:+.3f} ({term.value:.3g} instead of {others[term.scorer].value:.3g}, "
        f"times {term.weight:g})"
        for more, term in sorted(parts, key=lambda part: -abs(part[0]))
        if abs(more) > 1e-9
    )
    return f"costs {reason.cost - best.cost:.3f} more: {words}" if words else "equal: drawn by lot"


def _calm(policy: Policy) -> Policy:
    """The policy without probes: an explanation tells the usual order."""
    if isinstance(policy, RoundRobin | PowerOfTwo):
        return policy
    return policy.model_copy(update={"probe": policy.probe.model_copy(update={"share": 0.0})})


def _node_of(entry: Entry | None) -> str | None:
    return entry.state.node_id if entry is not None and entry.state is not None else None
