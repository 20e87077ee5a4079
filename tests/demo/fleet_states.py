"""Builders of replica states and samples for the tests of the demo and the plot."""

from typing import Any

from dps_ray.bench.fleet_samples import FleetSample
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.modes import Mode


def state(replica_id: str = "a", **fields: Any) -> ReplicaState:
    values: dict[str, Any] = {
        "sequence": 1,
        "sent_at_s": 0.0,
        "source": Source.ENGINE,
        "code_version": "test",
        "health": Health.READY,
        "mode": Mode.FULL,
        "restoring": False,
        "restore_progress": 1.0,
        "used_blocks": 9,
        "free_blocks": 18,
        "headroom_blocks": 162,
        "base_blocks": 27,
        "total_blocks": 171,
        "running": 3,
        "waiting": 0,
    }
    return ReplicaState(replica_id=replica_id, **{**values, **fields})


def sample(time_s: float, *states: ReplicaState) -> FleetSample:
    return FleetSample(time_s, {each.replica_id: each for each in states})
