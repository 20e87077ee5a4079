"""The mode-aware policy, one replica at a time and in plain Python: what the columns must equal."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.policies import FullFirst, ModeAware
from dps_ray.fleet.routing import Tier
from dps_ray.fleet.snapshot import Standing
from dps_ray.fleet.state import ReplicaState
from dps_ray.modes import Floor, Mode

from .builders import Given

Policy = ModeAware | FullFirst


def live_state(given: Given) -> ReplicaState | None:
    return given.entry.state if given.entry.standing is Standing.LIVE else None


def mode_of(given: Given) -> Mode | None:
    state = live_state(given)
    if state is not None:
        return state.mode
    return given.hint.mode if given.hint else None


def tier(given: Given, floors: set[Floor]) -> Tier:
    state, hint = live_state(given), given.hint
    tiers = [Tier.READY]
    if given.entry.standing in (Standing.DEAD, Standing.DRAINING):
        tiers.append(Tier.EXCLUDED)
    if state is None:
        tiers.append(Tier.UNKNOWN)
        if hint is not None and hint.dead:
            tiers.append(Tier.EXCLUDED)
        if hint is not None and hint.restoring:
            tiers.append(Tier.RESTORING)
    elif state.restoring:
        tiers.append(Tier.RESTORING)
    if floors != {Floor.ANY}:
        mode = mode_of(given)
        if mode is None:
            tiers.append(Tier.UNKNOWN)
        elif mode is Mode.FAST:
            tiers.append(Tier.EXCLUDED if Floor.FULL in floors else Tier.FAST)
    return max(tiers)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def others_load(given: Given) -> int | None:
    """Requests on a replica that are not of this router, as far as somebody knows."""
    state = live_state(given)
    if state is not None and state.running is not None and state.waiting is not None:
        return max(0, state.running + state.waiting - given.open_when_measured)
    return None if given.queue_len is None else max(0, given.queue_len - given.open_now)


def headroom_share(policy: Policy, given: Given) -> float | None:
    state = live_state(given)
    if state is None or state.headroom_blocks is None or not state.total_blocks:
        return None
    if state.waiting is None:
        return None
    size = policy.headroom.blocks_per_request
    if state.running and state.used_blocks is not None:
        size = state.used_blocks / state.running
    coming = state.waiting + given.open_now - given.open_when_measured
    return (state.headroom_blocks - coming * size) / state.total_blocks


def session_owner(session: str, replica_ids: Sequence[str]) -> str:
    def digest(text: str) -> int:
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())

    factor = digest(session) | 1
    return max(replica_ids, key=lambda name: digest(name) * factor % 2**64)


def costs(
    policy: Policy, replicas: Sequence[Given], ask: Ask, matches: Mapping[str, float], node: str
) -> dict[str, tuple[Tier, float]]:
    """Tier and cost of every replica."""
    own = Floor.PREFER_FULL if isinstance(policy, FullFirst) else Floor.ANY
    tiers = {given.replica_id: tier(given, {own, ask.floor}) for given in replicas}
    shares = {given.replica_id: headroom_share(policy, given) for given in replicas}
    blind = {tiers[name] for name, share in shares.items() if share is None}
    best = min(tiers.values())

    def peers(name: str) -> list[Given]:
        return [given for given in replicas if tiers[given.replica_id] is tiers[name]]

    def load(given: Given) -> float:
        own = others_load(given)
        known = [n for peer in peers(given.replica_id) if (n := others_load(peer)) is not None]
        return given.open_now + (mean(known) if own is None else own)

    def fast(given: Given) -> float:
        own = mode_of(given)
        modes = [m for peer in peers(given.replica_id) if (m := mode_of(peer)) is not None]
        return mean([m is Mode.FAST for m in modes]) if own is None else own is Mode.FAST

    owner = None
    if ask.session is not None:
        owner = session_owner(ask.session, [name for name, t in tiers.items() if t == best])
    result = {}
    for given in replicas:
        name, share = given.replica_id, shares[given.replica_id]
        cost = policy.mode.weight * fast(given)
        cost += policy.queue.weight * load(given)
        if share is not None and tiers[name] not in blind:
            cost += policy.headroom.weight * (1.0 - share)
        if matches:
            cost += policy.prefix.weight * (1.0 - matches.get(name, 0.0))
        if owner is not None:
            cost += policy.session.weight * (name != owner)
        cost += policy.locality.weight * (given.node_id != node)
        result[name] = (tiers[name], cost)
    return result
