"""A fleet without vLLM: real router, controller, probe and push loop around an engine of no cost.

Workers do not import this module: it is pickled by value (see ``conftest.py``).
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from dps_autoscaling.signals import to_stats as to_stats_for_scaling
from dps_deployments.controller_client import ControllerClient
from dps_deployments.hints import to_stats
from dps_deployments.probe import ReplicaProbe
from dps_deployments.ray_adapter import replica_identity, stop_flag
from dps_deployments.refusals import RefusalError
from dps_deployments.reporter import report_forever
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle

from dps_ray.engine.status_page import StatusPage
from dps_ray.fleet.permits import ReplicaPermits
from dps_ray.fleet.reporting import ReportOptions
from dps_ray.modes import Pin

CONTROLLER_APP = "dps-controller"
ROUTER = {
    "request_router_class": "dps_deployments.router.DpsRouter",
    "request_router_kwargs": {"controller_app": CONTROLLER_APP, "revision": "test"},
    "request_routing_stats_period_s": 0.5,
}

SERVICE_S = 0.01
RESTORING_SERVICE_S = 0.1
"""A replica serves slowly while the copy takes its host link."""
STREAM_CHUNKS = 75
STREAM_PERIOD_S = 0.08
LET_GO = "let go"
"""Last line of a stream that a test has let end."""
START_LOOK_S = 0.05
DRAIN_LOOP_S = 0.2
"""How often one that stops looks whether it still has requests; 2 s by default."""

front_api = FastAPI()


def page_key(replica_id: str) -> str:
    return f"cheap-{replica_id}"


class CheapReplica:
    """Says who it is. A test plays the engine: it writes the replica's status page, and pins it
    to ``fast`` to make the engine die, to ``full`` to let its streams end."""

    async def __init__(self, start_sign: str | None) -> None:
        while start_sign is not None and not os.path.exists(start_sign):
            await asyncio.sleep(START_LOOK_S)
        identity = replica_identity()
        self._replica_id = identity.replica_id
        page = self._page = StatusPage.create(page_key(self._replica_id))
        permits = ReplicaPermits(self._replica_id, time.monotonic())
        self._probe = ReplicaProbe(identity, "test", permits, stop_flag())
        self._probe.engine_started(
            lambda: page.requested_pin() is Pin.FAST, page.read, lambda: False
        )

        def obey() -> None:
            now_s = time.monotonic()
            page.set_permits(
                restore_until_s=permits.restore_until_s(now_s),
                fast=permits.may_go_fast(now_s),
                stop_restores=permits.must_stop_restores(now_s),
            )

        client = ControllerClient(CONTROLLER_APP, caller=f"replica {self._replica_id}")
        self._reports = asyncio.create_task(
            report_forever(client, self._probe.read, permits, obey, ReportOptions())
        )

    async def record_routing_stats(self) -> dict[str, Any]:
        return to_stats(self._probe.read())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return to_stats_for_scaling(self._probe.read())

    async def __call__(self) -> str:
        status = self._page.read()
        restoring = status is not None and status.restoring
        await asyncio.sleep(RESTORING_SERVICE_S if restoring else SERVICE_S)
        return self._replica_id

    async def stream(self, chunks: int) -> AsyncIterator[str]:
        """A long answer: the replica's id, line by line."""
        for _ in range(chunks):
            if self._page.requested_pin() is Pin.FULL:
                yield f"{LET_GO}\n"
                return
            yield f"{self._replica_id}\n"
            await asyncio.sleep(STREAM_PERIOD_S)


@serve.deployment(
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=200,
    graceful_shutdown_wait_loop_s=DRAIN_LOOP_S,
)
@serve.ingress(front_api)
class Front:
    """Sends each request on through the router under test."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    @front_api.get("/")
    async def serve_one(self) -> str:
        try:
            return await self._replicas.remote()
        except RefusalError as error:
            later = {"Retry-After": str(error.retry_after_s)}
            raise HTTPException(error.status_code, error.message, later) from error

    @front_api.get("/stream")
    async def serve_stream(self, chunks: int = STREAM_CHUNKS) -> StreamingResponse:
        return StreamingResponse(self._replicas.options(stream=True).stream.remote(chunks))


def cheap_app(
    *,
    router: dict[str, Any] | None = ROUTER,
    start_sign: str | None = None,
    version: str | None = None,
    **options: Any,
) -> serve.Application:
    """Replicas behind a front.

    Parameters
    ----------
    router
        Serve's ``request_router_config``; ``None`` for Serve's own router.
    start_sign
        File without which no replica ends its start.
    version
        Of the code: deploying the same again changes options in place. New without one.
    **options
        Serve options of the replicas; two replicas without any.
    """
    chosen = {"request_router_config": router} if router is not None else {}
    replicas = serve.deployment(
        CheapReplica,
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0},
        **chosen,
        **{"graceful_shutdown_wait_loop_s": DRAIN_LOOP_S, **(options or {"num_replicas": 2})},
    )
    front = Front
    if version is not None:
        # What a config file does for unchanged code.
        front = front.options(version=version, _internal=True)
        replicas = replicas.options(version=version, _internal=True)
    return front.bind(replicas.bind(start_sign))
