"""The scaler as a class-based autoscaling policy of Ray Serve 2.60.

Serve makes one object per deployment in its own controller process and calls it ten times a
second, so a call never waits for anything. What must outlive a call goes through Serve's
``policy_state``; Serve then applies its delays and bounds.
"""

import logging
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError
from ray.serve.config import AutoscalingContext

from dps_autoscaling.scaler import FleetLoad, Memory, Reason, ReplicaLoad, Scaler, ScalingOptions
from dps_autoscaling.signals import UP, from_stats
from dps_ray.config import DpsConfigError
from dps_ray.faults import faults_of

STATE_KEY = "dps"

logger = logging.getLogger("ray.serve")


class ElasticScalingPolicy:
    """``policy_function: dps_autoscaling.policy:ElasticScalingPolicy``.

    Parameters
    ----------
    **policy_kwargs
        Fields of ``ScalingOptions``.

    Raises
    ------
    DpsConfigError
        One sentence for each wrong field.
    """

    def __init__(self, **policy_kwargs: Any) -> None:
        try:
            self.options = ScalingOptions(**policy_kwargs)
        except ValidationError as error:
            raise DpsConfigError(*faults_of(error, "policy_kwargs")) from None
        self._scaler = Scaler(self.options)
        self._said: tuple[int, Reason] | None = None

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Wanted replicas and the state Serve keeps for the next call."""
        now_s = float(ctx.current_time)
        load = self.load_of(ctx, now_s)
        memory = Memory(**ctx.policy_state.get(STATE_KEY, {}))
        decision = self._scaler.decide(load, memory, now_s)
        said = decision.replicas, decision.reason
        if said != self._said:
            self._said = said
            logger.info(
                "%s: %d replicas wanted of %d (%s; demand %.2f)",
                ctx.deployment_name,
                decision.replicas,
                load.target,
                decision.reason,
                self._scaler.demand(load),
            )
        return decision.replicas, {STATE_KEY: asdict(decision.memory)}

    def load_of(self, ctx: AutoscalingContext, now_s: float) -> FleetLoad:
        """Read Serve's context; figures older than ``silent_after_s`` are unknown."""
        means, raw = ctx.aggregated_metrics or {}, ctx.raw_metrics or {}

        def load(replica_id: Any) -> ReplicaLoad | None:
            series = {name: of[replica_id] for name, of in raw.items() if of.get(replica_id)}
            heard = series.get(UP)
            if not heard or now_s - heard[-1].timestamp > self.options.silent_after_s:
                return None
            return from_stats(
                {name: of[replica_id] for name, of in means.items() if replica_id in of},
                {name: points[-1].value for name, points in series.items()},
            )

        return FleetLoad(
            replicas=[load(replica_id) for replica_id in ctx.running_replicas],
            target=ctx.target_num_replicas,
            minimum=ctx.capacity_adjusted_min_replicas,
            maximum=ctx.capacity_adjusted_max_replicas,
            requests=ctx.total_num_requests,
            queued=ctx.total_queued_requests or 0.0,
            target_requests=ctx.config.get_target_ongoing_requests(),
        )
