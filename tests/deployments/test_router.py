"""The router on played replicas: what it offers, and requests that wait for a first one."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dps_deployments import router as module
from dps_deployments.beside import beside
from dps_deployments.ray_adapter import PendingRequest, unplaced
from dps_deployments.refusals import BadRequestError, NoReplicaError, PrecisionUnavailableError
from dps_deployments.router import REPORT_PERIOD_S, DpsRouter
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)

from dps_ray.fleet.admission import AdmissionOptions

from .. import played_time

REPORT = DpsRouter._report
DEPLOYMENT = DeploymentID(name="replicas", app_name="app")


def replica(name: str) -> Any:
    return SimpleNamespace(
        replica_id=ReplicaID(unique_id=name, deployment_id=DEPLOYMENT),
        node_id="node",
        routing_stats={},
        max_ongoing_requests=10,
    )


def request(name: str, **headers: str) -> PendingRequest:
    metadata = RequestMetadata(request_id=name, internal_request_id=name)
    info = SimpleNamespace(headers={key.replace("_", "-"): v for key, v in headers.items()})
    return PendingRequest(args=[SimpleNamespace(), info], kwargs={}, metadata=metadata)


def routed(monkeypatch: pytest.MonkeyPatch, play: Callable[[DpsRouter], Awaitable[None]]) -> None:
    """Let a router without replicas and without a controller run during a play, in played time."""
    monkeypatch.setattr(module, "node_id", lambda: "node")
    monkeypatch.setattr(DpsRouter, "_listen", _idle)
    monkeypatch.setattr(DpsRouter, "_report", _idle)
    monkeypatch.setattr(DpsRouter, "_probe_queue_lens", _no_queue_lens)

    async def run() -> None:
        router = DpsRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            self_actor_id="actor",
            use_replica_queue_len_cache=True,
        )
        router.initialize_state(controller_app="controller", revision="test")
        router.update_replicas([])
        try:
            await play(router)
        finally:
            for task in router._tasks:
                task.cancel()

    played_time.run(monkeypatch, run())


async def _idle(router: DpsRouter) -> None:
    await asyncio.sleep(60.0)


async def _no_queue_lens(
    router: DpsRouter, replicas: list[Any], backoff_index: int
) -> list[tuple[Any, int]]:
    return [(each, 0) for each in replicas]


def test_replica_that_a_call_found_dead_is_offered_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(router: DpsRouter) -> None:
        replicas = [replica("dead"), replica("alive")]
        router.update_replicas(replicas)
        router.on_replica_actor_died(replicas[0].replica_id)
        # Serve tells its set anew whenever some statistics change, the dead one still in it.
        for told in (None, replicas, replicas):
            if told is not None:
                router.update_replicas(told)
            for _ in range(20):
                ranks = await router.choose_replicas(replicas, request("r"))
                assert [each.replica_id.unique_id for rank in ranks for each in rank] == ["alive"]
            assert router._view.report("router", "app").offered == ("alive",)
        router.update_replicas([replicas[1], replica("next")])
        assert router._view.report("router", "app").offered == ("alive", "next")
        assert not router._dead

    routed(monkeypatch, play)


def test_router_tells_at_once_what_the_controller_wants_to_know_about_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Controller:
        def __init__(self) -> None:
            self.reports: list[dict[str, Any]] = []

        async def report_router(self, report: dict[str, Any]) -> list[str]:
            self.reports.append(report)
            return ["r", "of another router"] if len(self.reports) == 1 else []

    async def play(router: DpsRouter) -> None:
        controller = router._reporter = cast(Any, Controller())
        router.update_replicas([replica("a")])
        asked = request("r")
        await router._choose_replica_for_request(asked)
        router.on_request_routed(asked, replica("a").replica_id, None)
        async with asyncio.timeout(0.5 * REPORT_PERIOD_S):
            await REPORT(router)
            await REPORT(router)
        first, second = controller.reports
        assert first["found"] == []
        (told,) = second["found"]
        assert (told["request_id"], told["accepted_by"]) == ("r", "a")
        assert [reason["replica_id"] for reason in told["reasons"]] == ["a"]

    routed(monkeypatch, play)


def test_without_replicas_a_request_is_refused_in_its_time_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(router: DpsRouter) -> None:
        router._view.admission = AdmissionOptions(no_replica_wait_s=0.3)
        waiting = [router._choose_replica_for_request(request(str(n))) for n in range(3)]
        async with asyncio.timeout(2.0):
            errors = await asyncio.gather(*waiting, return_exceptions=True)
        for error in errors:
            assert isinstance(error, NoReplicaError)
            assert error.status_code == 503
            assert error.retry_after_s is not None
        assert unplaced(router) == []
        assert router.num_pending_requests == 0
        assert not router._pending_requests_by_id

    routed(monkeypatch, play)


def test_without_replicas_a_bad_request_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(router: DpsRouter) -> None:
        bad = request("r", X_DPS_Precision="half")
        async with asyncio.timeout(2.0):
            with pytest.raises(BadRequestError):
                await router._choose_replica_for_request(bad)

    routed(monkeypatch, play)


def test_request_waits_for_a_first_replica_and_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(router: DpsRouter) -> None:
        waiting = asyncio.create_task(router._choose_replica_for_request(request("r")))
        await asyncio.sleep(0.6)
        assert not waiting.done()
        router.update_replicas([replica("first")])
        async with asyncio.timeout(2.0):
            assert (await waiting).replica_id.unique_id == "first"

    routed(monkeypatch, play)


def test_request_that_insists_on_full_precision_waits_for_a_place_no_longer_than_for_the_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(router: DpsRouter, replicas: list[Any], backoff_index: int) -> list[Any]:
        return [(each, each.max_ongoing_requests) for each in replicas]

    async def play(router: DpsRouter) -> None:
        router._view.admission = AdmissionOptions(full_wait_s=0.3)
        monkeypatch.setattr(DpsRouter, "_probe_queue_lens", full)
        router.update_replicas([replica("busy")])
        assert beside("app").serves_full
        insists = [request(str(n), X_DPS_Precision="full") for n in range(8)]
        waiting = [router._choose_replica_for_request(each) for each in insists]
        other = asyncio.create_task(router._choose_replica_for_request(request("other")))
        async with asyncio.timeout(10.0):
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, PrecisionUnavailableError)
        assert not other.done()
        monkeypatch.setattr(DpsRouter, "_probe_queue_lens", _no_queue_lens)
        async with asyncio.timeout(10.0):
            await other

    routed(monkeypatch, play)
