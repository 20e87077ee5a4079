"""A small fleet of real engines, and how tests talk to it."""

import time
from typing import Any

import httpx

from dps_ray.chaos.fleet import MODEL, tiny_llm_config
from dps_ray.checks.specs import EXACT
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

from ..cheap import CONTROLLER_APP, DRAIN_LOOP_S
from ..cluster import Cluster
from ..fleet import until

REPLICAS = 2
MAX_BODY_BYTES = 65536
BASE_KV_BYTES = 8 * 65536
"""Eight blocks of 32 tokens, one of them vLLM's own: two requests of four blocks do not fit."""
QUICK_DRAIN = {"graceful_shutdown_wait_loop_s": DRAIN_LOOP_S}


def llm_args(server: type) -> dict[str, Any]:
    """Arguments of a fleet of two tiny elastic replicas.

    Parameters
    ----------
    server
        Class of the replicas.
    """
    folder = make_tiny("qwen3", cache_root())
    llm_config = tiny_llm_config(
        str(folder),
        engine={
            "scheduling_policy": "priority",
            "kv_cache_memory_bytes": BASE_KV_BYTES,
            # Its tokens are compared with those of a static engine.
            "additional_config": {"dps": EXACT},
        },
        deployment={"num_replicas": REPLICAS, "max_ongoing_requests": 12, **QUICK_DRAIN},
    )
    args: dict[str, Any] = {
        "controller_app": CONTROLLER_APP,
        "limits": {"max_body_bytes": MAX_BODY_BYTES},
        "llm_config": {**llm_config, "server_cls": server},
        "ingress": {
            "num_replicas": 1,
            "max_ongoing_requests": 64,
            "ray_actor_options": {"num_cpus": 0},
            **QUICK_DRAIN,
        },
    }
    return args


def complete(api: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 8, **fields}
    return dict(api.post("/v1/completions", json=body).raise_for_status().json())


def ask(api: httpx.Client, **headers: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 8, "ignore_eos": True}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return api.post("/v1/completions", json=body, headers=named)


def live_states(cluster: Cluster) -> list[dict[str, Any]]:
    """What the live replicas last told the controller."""
    return [e["state"] for e in cluster.replicas("llm") if e["standing"] == "live"]


def wait_for_mode(cluster: Cluster, mode: str) -> None:
    """Wait until every live replica is in ``mode``."""
    deadline_s = time.monotonic() + 90.0
    while {state["mode"] for state in live_states(cluster)} != {mode}:
        assert time.monotonic() < deadline_s, f"replicas that are not in {mode} mode"
        time.sleep(0.1)


def total(cluster: Cluster, name: str) -> int:
    """A figure summed over the replicas: without one that stands still it would be too small."""
    states: list[dict[str, Any]] = []

    def all_are_live() -> bool:
        states[:] = live_states(cluster)
        return len(states) == REPLICAS

    until(all_are_live)
    return sum(state[name] for state in states)
