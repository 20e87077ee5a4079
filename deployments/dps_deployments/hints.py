"""Serve's own routing statistics as the fallback channel between replicas and routers.

Serve pulls them every second or so, keeps old values without an age, and tells every router anew
whenever any value differs. So they hold only what rarely changes and what matters most.
"""

from typing import Any

from dps_ray.fleet.routing import Hint
from dps_ray.fleet.state import Health, ReplicaState
from dps_ray.modes import Mode

_KEY = "dps"


def to_stats(state: ReplicaState) -> dict[str, Any]:
    """The coarse part of a state, in the form that Serve carries."""
    return {
        _KEY: {
            "mode": state.mode.value if state.mode is not None else None,
            "restoring": state.restoring,
            "dead": state.health is Health.DEAD,
        }
    }


def from_stats(stats: dict[str, Any]) -> Hint | None:
    """The hint in a replica's statistics; ``None`` when it has put none there (yet)."""
    values = stats.get(_KEY)
    if values is None:
        return None
    mode = values["mode"]
    return Hint(
        mode=Mode(mode) if mode is not None else None,
        restoring=values["restoring"],
        dead=values["dead"],
    )
