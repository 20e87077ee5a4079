"""A controller that listens, and callers of it over real connections; Serve's handle is played."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import Any

from dps_deployments.controller_client import ControllerClient
from dps_deployments.direct_calls import DirectCalls
from dps_deployments.explanations import Explanations
from dps_deployments.fleet_calls import FleetCalls
from dps_deployments.listener import Listener

from dps_ray.fleet.aggregate import AggregateOptions
from dps_ray.fleet.coordinator import Coordinator
from dps_ray.fleet.leases import LeaseOptions
from dps_ray.fleet.publication import ControllerOptions
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.fleet.tally import RouterReport
from dps_ray.fleet.ways import Access
from dps_ray.modes import Mode

OPTIONS = ControllerOptions(
    # However slowly a test runs, nobody grows stale and no version is made of mere heartbeats.
    ageing=AggregateOptions(stale_after_s=1e4, forget_after_s=1e5, publish_period_s=1e3),
    leases=LeaseOptions(ttl_s=math.inf, alone_after_s=None),
)


def state(replica_id: str, sequence: int = 1, mode: Mode = Mode.FULL) -> dict[str, Any]:
    return ReplicaState(
        replica_id=replica_id,
        sequence=sequence,
        sent_at_s=0.0,
        source=Source.ENGINE,
        code_version="test",
        health=Health.READY,
        mode=mode,
    ).model_dump(mode="json")


class PlayedController:
    """A controller's calls and its port; ``handle`` plays Serve's handle."""

    def __init__(self) -> None:
        coordinator = Coordinator(OPTIONS, time.monotonic)
        self.calls = FleetCalls(coordinator, Explanations(coordinator))
        self.direct = DirectCalls(self.calls)
        self.listener = Listener(self.direct, section="direct", purpose="calls", keep_alive_s=60)
        self.access: Access | None = None
        self.failure: Exception | None = None
        self.by_handle: list[str] = []

    async def start(self, port: int = 0) -> None:
        await self.listener.apply(("127.0.0.1", port))
        self.access = Access(f"http://{self.listener.address}", self.direct.secret)

    async def handle(self, method: str, *args: Any) -> Any:
        self.by_handle.append(method)
        if self.failure is not None:
            raise self.failure
        if method == "direct_access":
            if self.access is None:
                return None
            return {**asdict(self.access), "key": "of a later release"}
        if method == "listen":
            return await self.calls.listen(*args)
        (given,) = args
        if method == "report":
            return self.calls.report(ReplicaState.model_validate(given)).model_dump(mode="json")
        return self.calls.report_router(RouterReport.model_validate(given))


Play = Callable[[PlayedController, ControllerClient], Awaitable[None]]


def played(play: Play, run_it: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run) -> None:
    """Run a play of a controller that listens and one of its callers."""

    async def run() -> None:
        controller = PlayedController()

        class Method:
            def __init__(self, name: str) -> None:
                self.name = name

            def remote(self, *args: Any) -> Awaitable[Any]:
                return controller.handle(self.name, *args)

        async def resolve(app: str, deployment: str, method: str) -> Any:
            return Method(method)

        await controller.start()
        client = ControllerClient("app", "a caller", resolve)
        try:
            await play(controller, client)
        finally:
            await client._direct._transport.aclose()
            await controller.listener.close()

    run_it(run())
