"""The fleet that scales: tiny elastic engines behind the real Serve stack, windows of seconds."""

from typing import Any

from dps_autoscaling.scaler import ScalingOptions

from dps_ray.chaos.fleet import REQUEST_TIMEOUT_S, tiny_fleet
from dps_ray.demo.serve_config import FleetConfig

MIN_REPLICAS, MAX_REPLICAS = 1, 3
REPORT_S = 1.0
"""Period at which replicas report to Serve's autoscaler, seconds. Serve's own, ten seconds, would
need windows, and a burst, ten times as long."""
BASE_BLOCKS, BLOCK_BYTES = 40, 65536
"""KV blocks of 32 tokens that one replica has in full mode."""
MAX_MODEL_LEN = 512
POLICY: dict[str, Any] = {"calm_s": 20.0, "silent_after_s": 5.0}
OPTIONS = ScalingOptions(**POLICY)
FULL_WAIT_S = REQUEST_TIMEOUT_S - 10.0
"""A request that insists on full precision waits for it as long as it may: none is refused."""


def burst_config() -> FleetConfig:
    """Serve configuration of the fleet."""
    return tiny_fleet(
        MAX_REPLICAS,
        engine={
            "max_model_len": MAX_MODEL_LEN,
            "kv_cache_memory_bytes": BASE_BLOCKS * BLOCK_BYTES,
        },
        scaling={
            "min_replicas": MIN_REPLICAS,
            "target_ongoing_requests": 8,
            "metrics_interval_s": REPORT_S,
            "look_back_period_s": 6,
            "upscale_delay_s": 6,
            "downscale_delay_s": 1,
            "policy": {
                "policy_function": "dps_autoscaling.policy:ElasticScalingPolicy",
                "policy_kwargs": POLICY,
            },
        },
        user_config={"admission": {"full_wait_s": FULL_WAIT_S}},
    )
