"""Fleets of tiny elastic engines behind the real Serve stack; the one that is hurt."""

from typing import Any

from dps_ray.demo.serve_config import BUILDER, FleetConfig
from dps_ray.fleet.admission import AdmissionOptions

MODEL = "tiny"
FLEET_APP = "llm"
MAX_ONGOING = 64
"""Requests that one replica may hold."""
REQUEST_TIMEOUT_S = 180
"""Above the longest wait for a replica, so that a fleet without one says so itself."""
START_TIMEOUT_S = 300.0
HUNG_AFTER_S = 20.0
"""An engine that answers nothing for so long hangs: steps of the tiny model take milliseconds, and
seconds where other programs crowd the processor."""
BASE_KV_BYTES = 8 * 65536
"""Eight blocks of 32 tokens: a wave of requests asks for several times as much."""


def tiny_llm_config(
    source: str, *, engine: dict[str, Any], deployment: dict[str, Any]
) -> dict[str, Any]:
    """``llm_config`` of elastic engines on a CPU that go fast and come back within a test.

    Parameters
    ----------
    source
        Folder of the model.
    engine, deployment
        What is added to ``engine_kwargs`` and ``deployment_config``.
    """
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": source},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "runtime_env": {
            "env_vars": {
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1",
            }
        },
        "engine_kwargs": {
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 16,
            "block_size": 32,
            "quantization": "dps",
            "additional_config": {"dps": {"min_fast_dwell_s": 0.0}},
            **engine,
        },
        "deployment_config": {
            "ray_actor_options": {"num_cpus": 0},
            "health_check_period_s": 1,
            **deployment,
        },
    }


def tiny_fleet(
    replicas: int,
    *,
    engine: dict[str, Any],
    report: dict[str, Any] | None = None,
    scaling: dict[str, Any] | None = None,
    user_config: dict[str, Any] | None = None,
) -> FleetConfig:
    """Serve configuration of tiny elastic replicas behind the real Serve stack.

    Parameters
    ----------
    replicas
        Number of replicas, or the largest number where they scale.
    engine
        What is added to ``engine_kwargs``.
    report
        ``report`` of the fleet's ``args``.
    scaling
        ``autoscaling_config``, without its largest number.
    user_config
        Of the controller.
    """
    controller = {
        "name": "dps-controller",
        "route_prefix": "/dps",
        "import_path": "dps_deployments.app:build_controller",
        "deployments": [{"name": "FleetController", "user_config": user_config or {}}],
    }
    size = (
        {"num_replicas": replicas}
        if scaling is None
        else {"autoscaling_config": {"max_replicas": replicas, **scaling}}
    )
    llm_config = tiny_llm_config(
        "",
        engine=engine,
        deployment={
            **size,
            "max_ongoing_requests": MAX_ONGOING,
            "health_check_timeout_s": 30,
        },
    )
    fleet = {
        "name": FLEET_APP,
        "route_prefix": "/",
        "import_path": BUILDER,
        "args": {
            "ingress": {
                "num_replicas": 1,
                # What the replicas hold, a full queue and as many that pass it, and room for those
                # that are shed.
                "max_ongoing_requests": replicas * MAX_ONGOING + 3 * AdmissionOptions().max_waiting,
                "ray_actor_options": {"num_cpus": 0},
            },
            "request_timeout_s": REQUEST_TIMEOUT_S,
            "report": report or {},
            "llm_config": llm_config,
        },
    }
    return FleetConfig(
        {
            "proxy_location": "HeadOnly",
            "http_options": {
                "host": "127.0.0.1",
                "port": 8000,
                "request_timeout_s": REQUEST_TIMEOUT_S,
            },
            "logging_config": {"enable_access_log": False},
            "applications": [controller, fleet],
        }
    )


def chaos_config(replicas: int, ranks: int) -> FleetConfig:
    """Serve configuration of the fleet that is hurt.

    Parameters
    ----------
    replicas
        Number of replicas.
    ranks
        Tensor-parallel ranks of each.
    """
    return tiny_fleet(
        replicas,
        engine={
            "tensor_parallel_size": ranks,
            "kv_cache_memory_bytes": BASE_KV_BYTES // ranks,
        },
        report={"hung_after_s": HUNG_AFTER_S},
    )
