"""What a replica tells Serve's autoscaler: flat numbers, and no entry for what is not known.

Serve takes ``dict[str, int | float]`` only, and a wrong type in the first answer silences a replica
for good.
"""

from collections.abc import Mapping

from dps_autoscaling.scaler import ReplicaLoad
from dps_ray.fleet.state import Health, ReplicaState
from dps_ray.modes import Mode

PRESSURE, FAST, WAITING = "dps_pressure", "dps_fast", "dps_waiting"
RESTORING, FULL_REQUESTS = "dps_restoring", "dps_full_requests"
UP = "dps_up"
"""Always there, so that a replica that says nothing can be told from one that knows nothing."""


def to_stats(state: ReplicaState) -> dict[str, float]:
    """Form of a state that ``record_autoscaling_stats`` may return."""
    stats = {
        UP: float(state.health is Health.READY),
        FAST: float(state.mode is Mode.FAST) if state.mode is not None else None,
        WAITING: state.waiting,
        RESTORING: float(state.restoring) if state.restoring is not None else None,
        FULL_REQUESTS: state.full_requests,
    }
    if state.used_blocks is not None and state.base_blocks:
        stats[PRESSURE] = state.used_blocks / state.base_blocks
    return {name: float(value) for name, value in stats.items() if value is not None}


def from_stats(means: Mapping[str, float], latest: Mapping[str, float]) -> ReplicaLoad:
    """Read one replica's figures back from Serve.

    Parameters
    ----------
    means
        Means over the look-back period, by name.
    latest
        Newest values, by name.
    """
    restoring = latest.get(RESTORING)
    return ReplicaLoad(
        pressure=means.get(PRESSURE),
        fast_share=means.get(FAST),
        waiting=means.get(WAITING),
        restoring=bool(restoring) if restoring is not None else None,
        full_requests=latest.get(FULL_REQUESTS),
    )
