"""Values that several fleet tests start from."""

from typing import Any

from dps_ray.fleet.routing import Candidate, Hint
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


def candidate(
    replica_id: str,
    *,
    age_s: float | None = 0.1,
    placed_since: int = 0,
    queue_len: int | None = None,
    hint: Hint | None = None,
    **changes: Any,
) -> Candidate:
    """A candidate whose state is ``age_s`` old; ``None`` for one that was never heard."""
    if age_s is None:
        entry = Entry.cold(replica_id)
    else:
        state = replica_state(replica_id, **changes)
        standing = classify(state, age_s, FreshnessOptions())
        entry = Entry(replica_id=replica_id, standing=standing, age_s=age_s, state=state)
    return Candidate(
        entry=entry,
        placed_since=placed_since,
        open_requests=max(0, placed_since),
        queue_len=queue_len,
        hint=hint,
    )
