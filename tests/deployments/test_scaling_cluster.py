"""The elastic policy inside a real Serve controller: from zero to the limit and back to zero."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from ray import serve

from dps_ray.engine.status_page import StatusPage
from dps_ray.status import EngineStatus

from .cheap import cheap_app, page_key
from .cluster import Cluster
from .fleet import wait_for_routers
from .statuses import IDLE

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s`:DeprecationWarning"),
]

APP = "scaled"
MAX_REPLICAS = 3
CALM_S = 2.0
HOLD_MARGIN_S = 3.0
"""Serve's own delay and look back before it stops a replica, and then some."""
NO_REPLICA_WAIT_S = 0.3
PRESSED = replace(IDLE, used_blocks=90, free_blocks=10, headroom_blocks=10)
HOLDING = replace(IDLE, full_requests=1)


@pytest.fixture
def start_sign(tmp_path: Path) -> Path:
    """No replica ends its start before this file is there."""
    return tmp_path / "start"


@pytest.fixture
def app(cluster: Cluster, start_sign: Path) -> Iterator[Cluster]:
    scaled = cheap_app(
        start_sign=str(start_sign),
        autoscaling_config={
            "min_replicas": 0,
            "max_replicas": MAX_REPLICAS,
            "target_ongoing_requests": 10,
            "metrics_interval_s": 0.5,
            "look_back_period_s": 2,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 0.5,
            "policy": {
                "policy_function": "dps_autoscaling.policy:ElasticScalingPolicy",
                "policy_kwargs": {"calm_s": CALM_S, "idle_s": CALM_S, "silent_after_s": 60},
            },
        },
    )
    cluster.run(scaled, APP, "/scaled")
    yield cluster
    serve.delete(APP)


def running() -> int:
    deployment = serve.status().applications[APP].deployments["CheapReplica"]
    return int(deployment.replica_states.get("RUNNING", 0))


def live(app: Cluster) -> list[str]:
    """Replicas that the controller has just heard."""
    return [entry["replica_id"] for entry in app.replicas(APP) if entry["standing"] == "live"]


def publish(app: Cluster, status: EngineStatus, replicas: int) -> None:
    """All of so many replicas play this engine status."""
    replica_ids: list[str] = []

    def all_are_live() -> bool:
        replica_ids[:] = live(app)
        return len(replica_ids) == replicas

    watch(all_are_live, 60)
    for replica_id in replica_ids:
        StatusPage.attach(page_key(replica_id)).publish(status)


def watch(holds: Callable[[], bool], timeout_s: float) -> list[int]:
    """Numbers of running replicas, each once, until a condition holds."""
    seen = [running()]
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"the condition never held; replicas: {seen}"
        time.sleep(0.2)
        now = running()
        if now != seen[-1]:
            seen.append(now)
    return seen


def refused_without_replicas(app: Cluster) -> httpx.Response:
    """Ask while no replica can start and patience is short."""
    app.configure({"admission": {"no_replica_wait_s": NO_REPLICA_WAIT_S}})
    try:
        return httpx.get(f"{app.url}/scaled/", timeout=120)
    finally:
        app.configure({})
        wait_for_routers(app, APP)


def test_fleet_grows_from_zero_under_pressure_keeps_promises_and_returns_to_zero(
    app: Cluster, start_sign: Path, record_property: Callable[[str, object], None]
) -> None:
    watch(lambda: serve.status().applications[APP].status == "RUNNING", 60)
    assert running() == 0
    refused = refused_without_replicas(app)
    record_property("seconds until the refusal", refused.elapsed.total_seconds())
    assert refused.status_code == 503
    assert float(refused.headers["Retry-After"]) >= 1
    start_sign.touch()
    # While it is open, the only replica is not idle.
    with httpx.stream(
        "GET", f"{app.url}/scaled/stream", params={"chunks": 1_000_000}, timeout=120
    ) as stream:
        lines = stream.raise_for_status().iter_lines()
        next(lines)
        assert running() == 1
        publish(app, PRESSED, 1)
        grown = watch(lambda: running() == MAX_REPLICAS, 120)
    assert grown == sorted(grown)

    publish(app, HOLDING, MAX_REPLICAS)
    time.sleep(CALM_S + HOLD_MARGIN_S)
    assert running() == MAX_REPLICAS, "a replica that owes full precision must not be stopped"

    publish(app, IDLE, MAX_REPLICAS)
    shrunk = watch(lambda: running() == 0, 120)
    record_property("replicas while shrinking", shrunk)
    assert shrunk == sorted(shrunk, reverse=True)
