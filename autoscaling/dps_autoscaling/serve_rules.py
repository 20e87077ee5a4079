"""Serve's own rules around a policy, on a clock of the caller's.

Serve applies them inside its controller and on the wall clock; a simulation has to apply the very
same ones, so this module, and only this one, calls Ray's private functions.
"""

from collections.abc import Callable
from typing import Any

from dps_autoscaling.ray_version import require_supported_ray

require_supported_ray()

from ray.serve.autoscaling_policy import (  # noqa: E402
    _apply_delay_logic,
    _get_cold_start_scale_up_replicas,
)
from ray.serve.config import AutoscalingContext  # noqa: E402

Policy = Callable[[AutoscalingContext], tuple[int, dict[str, Any]]]


def next_target(policy: Policy, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Replicas that Serve would want next, and the state it would keep.

    Parameters
    ----------
    policy
        A deployment's autoscaling policy.
    ctx
        One reading; ``current_time`` is the moment of the decision, seconds.
    """
    cold_start = _get_cold_start_scale_up_replicas(ctx)
    if cold_start is not None:
        return int(cold_start), ctx.policy_state
    wanted, state = policy(ctx)
    target, delays = _apply_delay_logic(
        wanted, ctx.target_num_replicas, ctx.config, dict(ctx.policy_state), _now=ctx.current_time
    )
    bounded = min(
        max(target, ctx.capacity_adjusted_min_replicas), ctx.capacity_adjusted_max_replicas
    )
    return bounded, {**delays, **state}
