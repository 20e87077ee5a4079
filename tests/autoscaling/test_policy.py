"""The Serve adapter: what replicas record comes back as loads, aged, in Ray's own context."""

from dataclasses import dataclass
from typing import Any

import pytest
from dps_autoscaling.policy import STATE_KEY, ElasticScalingPolicy
from dps_autoscaling.scaler import ReplicaLoad
from dps_autoscaling.serve_rules import next_target
from dps_autoscaling.signals import to_stats
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from dps_ray.config import DpsConfigError
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.modes import Mode

CONFIG = AutoscalingConfig(
    min_replicas=1,
    max_replicas=4,
    target_ongoing_requests=10,
    upscale_delay_s=30,
    downscale_delay_s=5,
    policy={"policy_function": "dps_autoscaling.policy:ElasticScalingPolicy"},
)


@dataclass(frozen=True)
class Point:
    timestamp: float
    value: float


def state(**known: Any) -> ReplicaState:
    values = {
        "replica_id": "r",
        "sequence": 1,
        "sent_at_s": 0.0,
        "source": Source.ENGINE,
        "code_version": "test",
        "health": Health.READY,
    }
    return ReplicaState(**{**values, **known})


PRESSED = state(
    mode=Mode.FAST, used_blocks=90, base_blocks=60, waiting=3, restoring=False, full_requests=2
)


def context(
    now_s: float, *reports: tuple[float, ReplicaState], memory: dict[str, Any] | None = None
) -> AutoscalingContext:
    """Ray's context of replicas that reported once, each at its own time."""
    raw: dict[str, dict[int, list[Point]]] = {}
    for index, (at_s, reported) in enumerate(reports):
        for name, value in to_stats(reported).items():
            raw.setdefault(name, {})[index] = [Point(at_s, value)]
    return AutoscalingContext(
        deployment_id="d",
        deployment_name="d",
        app_name="a",
        current_num_replicas=len(reports),
        target_num_replicas=len(reports),
        running_replicas=list(range(len(reports))),
        total_num_requests=4.0,
        total_queued_requests=0.0,
        aggregated_metrics={
            name: {index: points[0].value for index, points in series.items()}
            for name, series in raw.items()
        },
        raw_metrics=raw,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        policy_state=memory or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now_s,
        config=CONFIG,
    )


def test_what_a_replica_records_comes_back_and_the_unknown_stays_unknown() -> None:
    policy = ElasticScalingPolicy()
    load = policy.load_of(context(100.0, (95.0, PRESSED), (95.0, state())), 100.0)
    assert load.replicas == [ReplicaLoad(1.5, 1.0, 3.0, False, 2.0), ReplicaLoad()]


def test_every_recorded_value_is_a_number_serve_accepts() -> None:
    for recorded in (PRESSED, state(), state(health=Health.STARTING)):
        stats = to_stats(recorded)
        assert stats
        assert all(type(value) is float for value in stats.values())


def test_figures_of_a_replica_that_fell_silent_are_unknown() -> None:
    policy = ElasticScalingPolicy(silent_after_s=20)
    load = policy.load_of(context(100.0, (79.0, PRESSED), (81.0, PRESSED)), 100.0)
    assert load.replicas[0] is None
    assert load.replicas[1] is not None


def test_wish_to_grow_must_last_for_serves_delay_and_memory_survives_between_calls() -> None:
    policy, memory = ElasticScalingPolicy(), {}
    targets = []
    for second in (0.0, 15.0, 29.0, 30.0):
        target, memory = next_target(policy, context(second, (second, PRESSED), memory=memory))
        targets.append(target)
    assert targets == [1, 1, 1, 3]
    assert memory[STATE_KEY]["target"] == 1


def test_ray_builds_the_policy_from_its_name() -> None:
    built = CONFIG.policy.get_policy()(calm_s=30)
    assert built.options.calm_s == 30
    with pytest.raises(DpsConfigError, match=r"policy_kwargs\.clm_s is not an option"):
        CONFIG.policy.get_policy()(clm_s=30)
