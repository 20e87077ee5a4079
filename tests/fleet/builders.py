"""Values that several fleet tests start from."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.columns import Columns
from dps_ray.fleet.decision import Decision
from dps_ray.fleet.policies import Policy
from dps_ray.fleet.routing import Hint, Peer
from dps_ray.fleet.snapshot import Entry, FreshnessOptions, classify
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.modes import Mode


def replica_state(replica_id: str = "a", sequence: int = 1, **changes: Any) -> ReplicaState:
    """A ready full-mode replica with all of its 100 blocks free, unless told otherwise."""
    values: dict[str, Any] = {
        "replica_id": replica_id,
        "sequence": sequence,
        "sent_at_s": 0.0,
        "source": Source.ENGINE,
        "code_version": "test",
        "health": Health.READY,
        "mode": Mode.FULL,
        "restoring": False,
        "used_blocks": 0,
        "free_blocks": 40,
        "headroom_blocks": 100,
        "base_blocks": 40,
        "total_blocks": 100,
        "running": 0,
        "waiting": 0,
    }
    return ReplicaState(**{**values, **changes})


@dataclass(frozen=True)
class Given:
    """Everything a router knows about one replica."""

    entry: Entry
    node_id: str | None = None
    hint: Hint | None = None
    queue_len: int | None = None
    open_when_measured: int = 0
    open_now: int = 0

    @property
    def replica_id(self) -> str:
        return self.entry.replica_id


def given_replica(
    replica_id: str,
    *,
    age_s: float | None = 0.1,
    placed_since: int = 0,
    queue_len: int | None = None,
    hint: Hint | None = None,
    node_id: str | None = None,
    **changes: Any,
) -> Given:
    """A replica whose state is ``age_s`` old; ``None`` for one that was never heard."""
    if age_s is None:
        entry = Entry.cold(replica_id)
    else:
        state = replica_state(replica_id, **changes)
        standing = classify(state, age_s, FreshnessOptions())
        entry = Entry(replica_id=replica_id, standing=standing, age_s=age_s, state=state)
    return Given(
        entry=entry,
        node_id=node_id,
        hint=hint,
        queue_len=queue_len,
        open_when_measured=max(0, -placed_since),
        open_now=max(0, placed_since),
    )


def columns_of(*replicas: Given, node_id: str | None = None) -> Columns:
    """The columns of a router that knows these replicas."""
    peers = [Peer(given.replica_id, given.node_id, given.hint) for given in replicas]
    columns = Columns(peers, node_id)
    for row, given in enumerate(replicas):
        columns.set_entry(given.entry, given.hint, given.open_when_measured)
        columns.open_requests[row] = given.open_now
        if given.queue_len is not None:
            columns.queue_len[row] = given.queue_len
    return columns


def decide(
    policy: Policy, *replicas: Given, ask: Ask | None = None, seed: int = 0, **options: Any
) -> Decision:
    """What a policy makes of these replicas, for a router on the node ``here``."""
    pipeline = policy.build(np.random.default_rng(seed))
    options = {"limit": 100, **options}
    matches = options.pop("matches", {})
    columns = columns_of(*replicas, node_id="here")
    return pipeline.decide(columns, ask or Ask(), matches, **options)
