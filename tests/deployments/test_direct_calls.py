"""Calls to the controller's own port, over real connections; the handle is played."""

import asyncio
import contextlib
import itertools
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from dps_deployments import controller_client
from dps_deployments import direct_calls as direct_calls_module
from dps_deployments.controller_client import ControllerClient, ControllerUnavailableError
from dps_deployments.direct_calls import DirectCalls
from dps_deployments.explanations import Explanations
from dps_deployments.fleet_calls import GATHER_S, FleetCalls
from dps_deployments.listener import Listener
from ray.exceptions import ActorDiedError, RayTaskError

from dps_ray.fleet.backoff import Backoff
from dps_ray.fleet.coordinator import Coordinator, Reply
from dps_ray.fleet.leases import LeaseOptions
from dps_ray.fleet.publication import ControllerOptions, Publication
from dps_ray.fleet.snapshot import Standing
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.fleet.tally import RouterReport
from dps_ray.fleet.ways import Access, Ways
from dps_ray.modes import Mode

OPTIONS = ControllerOptions(leases=LeaseOptions(ttl_s=math.inf, alone_after_s=None))


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


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What callers write to their logs."""
    lines: list[str] = []

    def note(text: str, *args: object) -> None:
        # The port writes to the same log.
        if text.startswith("%s: fleet controller"):
            lines.append(text % args)

    for level in ("info", "warning"):
        monkeypatch.setattr(controller_client.logger, level, note)
    return lines


Play = Callable[[PlayedController, ControllerClient], Awaitable[None]]


def played(play: Play) -> None:
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

    asyncio.run(run())


@contextlib.asynccontextmanager
async def web() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield client


def test_handle_is_asked_once_and_then_every_call_is_direct() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        for sequence in range(1, 4):
            reply = Reply.model_validate(await client.report(state("a", sequence)))
            assert reply.verdict.accepted
        # Plain JSON has no such number.
        assert reply.terms.ttl_s == math.inf
        published = Publication.model_validate(await client.listen(None, 1.0))
        assert [entry.replica_id for entry in published.snapshot.entries] == ["a"]
        assert await client.listen(published.snapshot.version, 0.0) is None
        report = RouterReport(router_id="r", node_id=None, policy="mode_aware", version=1)
        assert await client.report_router(report.model_dump(mode="json")) == []
        assert controller.by_handle == ["direct_access"]
        assert controller.direct.answered == 6

    played(play)


def test_answer_comes_in_one_piece() -> None:
    """Where it comes in two, the second waits 40 ms for the acknowledgement of the first."""

    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await client.report(state("a", 1))
        trips_s = []
        for sequence in range(2, 12):
            sent_s = time.monotonic()
            await client.report(state("a", sequence))
            trips_s.append(time.monotonic() - sent_s)
        assert min(trips_s) < 0.03

    played(play)


def test_only_the_secret_opens_the_port_and_bodies_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct_calls_module, "MAX_BODY_BYTES", 1000)

    async def play(controller: PlayedController, client: ControllerClient) -> None:
        url, right = f"http://{controller.listener.address}", controller.direct.secret

        async def status(path: str, secret: str | None, body: bytes) -> int:
            headers = {} if secret is None else {"Authorization": f"Bearer {secret}".encode()}
            async with web() as caller:
                return (await caller.post(url + path, headers=headers, content=body)).status_code

        assert await status("/report", None, b"[]") == 401
        assert await status("/report", right[:-1], b"[]") == 401
        assert await status("/report", "ü", b"[]") == 401
        assert await status("/nothing", right, b"[]") == 404
        assert await status("/report", right, b"[") == 422
        assert await status("/report", right, b" " * 1001) == 413
        assert controller.direct.answered == 0

    played(play)


def test_refused_report_is_the_callers_and_leaves_the_way_open() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        with pytest.raises(ControllerUnavailableError, match="422"):
            await client.report({**state("a"), "mode": "slow"})
        await client.report(state("a"))
        assert controller.by_handle == ["direct_access"]

    played(play)


def test_restarted_controller_is_found_within_one_call() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await client.report(state("a"))
        # At the same place with another secret, and then at another place.
        assert controller.listener.bound is not None
        port = controller.listener.bound[1]
        for place in (port, 0):
            await controller.listener.close()
            controller.direct = DirectCalls(controller.calls)
            controller.listener = Listener(
                controller.direct, section="direct", purpose="calls", keep_alive_s=60
            )
            await controller.start(place)
            controller.by_handle.clear()
            await client.report(state("a", 2))
            assert controller.by_handle == ["direct_access"]
            assert controller.direct.answered == 1

    played(play)


def test_dead_controller_is_unavailable_and_not_taken_for_an_old_one() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await client.report(state("a"))
        await controller.listener.close()
        controller.failure = ActorDiedError()
        with pytest.raises(ControllerUnavailableError):
            await client.report(state("a", 2))
        controller.failure = None
        await controller.start()
        controller.by_handle.clear()
        await client.report(state("a", 3))
        assert controller.by_handle == ["direct_access"]

    played(play)


def test_port_that_is_blocked_is_named_once_and_tried_again(said: list[str]) -> None:
    now_s = 0.0

    async def play(controller: PlayedController, client: ControllerClient) -> None:
        nonlocal now_s
        client._ways = Ways(lambda: now_s, Backoff(2.0, 2.0))
        opened = controller.access
        # Nobody answers there: connections are refused.
        await controller.listener.close()
        for sequence in range(1, 4):
            await client.report(state("a", sequence))
        assert controller.by_handle == ["direct_access", "report", "report", "report"]
        now_s += 2.0
        await client.report(state("a", 4))
        assert controller.by_handle[4:] == ["direct_access", "report"]
        (warning,) = said
        assert "`direct.address` of its status" in warning
        assert opened is not None
        assert opened.secret not in warning
        await controller.start()
        now_s += 2.0
        await client.report(state("a", 5))
        assert controller.by_handle[6:] == ["direct_access"]
        assert controller.direct.answered == 1

    played(play)
    assert "at its own port again" in said[1]


def test_network_that_swallows_everything_leaves_time_for_the_handle() -> None:
    class Swallowed(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(request.extensions["timeout"]["connect"])
            raise httpx.ConnectTimeout("")

    async def play(controller: PlayedController, client: ControllerClient) -> None:
        client._direct._transport = Swallowed()  # type: ignore[assignment]
        reply = Reply.model_validate(await client.report(state("a")))
        assert reply.verdict.accepted

    played(play)


@pytest.mark.parametrize("release", ["older", "closed"])
def test_controller_without_a_port_is_called_by_its_handle(release: str, said: list[str]) -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        handle = controller.handle

        async def older(method: str, *args: Any) -> Any:
            if method == "direct_access":
                # What Serve answers about a method that is not there.
                raise RayTaskError("direct_access", "", AttributeError())
            return await handle(method, *args)

        if release == "older":
            controller.handle = older  # type: ignore[method-assign]
        controller.access = None
        for sequence in range(1, 4):
            await client.report(state("a", sequence))
        assert [name for name in controller.by_handle if name == "report"] == ["report"] * 3

    played(play)
    assert said == []


def test_slow_controller_is_unavailable_and_not_asked_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller_client, "CALL_TIMEOUT_S", 0.8)

    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await client.report(state("a"))

        async def slow(path: str, body: bytes, receive: Any) -> Any:
            await asyncio.sleep(1.2)

        with monkeypatch.context() as patch:
            patch.setattr(controller.direct, "_call", slow)
            with pytest.raises(ControllerUnavailableError):
                await client.report(state("a", 2))
        await client.report(state("a", 3))
        assert controller.by_handle == ["direct_access"]

    played(play)


def test_router_that_has_gone_listens_no_longer() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await client.report(state("a"))
        first = await client.listen(None, 1.0)
        assert first is not None
        listening = asyncio.create_task(client.listen(first["snapshot"]["version"], 20.0))
        async with asyncio.timeout(5.0):
            while controller.calls.listeners == 0:
                await asyncio.sleep(0.01)
            listening.cancel()
            while controller.calls.listeners == 1:
                await asyncio.sleep(0.01)

    played(play)


def test_router_that_listens_goes_on_by_the_handle_when_the_port_closes(said: list[str]) -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await client.report(state("a"))
        first = await client.listen(None, 1.0)
        assert first is not None
        listening = asyncio.create_task(client.listen(first["snapshot"]["version"], 20.0))
        async with asyncio.timeout(5.0):
            while controller.calls.listeners == 0:
                await asyncio.sleep(0.01)
            controller.access = None
            await controller.listener.close()
            while "listen" not in controller.by_handle:
                await asyncio.sleep(0.01)
            await client.report(state("b"))
            assert await listening is not None

    played(play)
    assert said == []


def test_router_gets_fifty_publications_a_second_at_most_and_the_first_at_once() -> None:
    async def run() -> None:
        controller = PlayedController()
        told: list[tuple[float, set[str]]] = []

        async def router() -> None:
            version = None
            while len(told) < 8:
                publication = await controller.calls.listen(version, 5.0)
                assert publication is not None
                snapshot = publication["snapshot"]
                version = snapshot["version"]
                names = {entry["replica_id"] for entry in snapshot["entries"]}
                told.append((time.monotonic(), names))

        listening = asyncio.create_task(router())
        await asyncio.sleep(2 * GATHER_S)
        quiet = len(told)
        number = 0
        while not listening.done():
            number += 1
            controller.calls.report(ReplicaState.model_validate(state(f"r{number}")))
            await asyncio.sleep(0.001)
        await listening
        # A change is reported every millisecond.
        assert len(told[quiet][1]) <= 3
        gaps_s = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(told[quiet:])]
        assert min(gaps_s) > 0.9 * GATHER_S
        assert max(len(names) for _, names in told[quiet:]) > 3

    asyncio.run(run())


async def standing(controller: PlayedController) -> tuple[Standing, bool]:
    published = await controller.calls.listen(None, 0.0)
    (entry,) = Publication.model_validate(published).snapshot.entries
    return entry.standing, entry.lost


def test_replica_whose_process_is_killed_is_published_as_dead_at_once() -> None:
    """Its connection breaks, and no report was due."""

    async def play(controller: PlayedController, client: ControllerClient) -> None:
        access = controller.access
        assert access is not None
        await client.report(state("a"))
        script = f"""
import asyncio
from dps_deployments.direct_client import DirectClient
from dps_ray.fleet.ways import Access
asyncio.run(DirectClient().attend(Access({access.url!r}, {access.secret!r}), "a"))
"""
        assert client._attending is not None
        killed = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        async with asyncio.timeout(60.0):
            while controller.calls.attending["a"] < 2:
                await asyncio.sleep(0.01)
        # While another connection of the replica is open it has not gone.
        client._attending.cancel()
        while controller.calls.attending["a"] == 2:
            await asyncio.sleep(0.01)
        assert await standing(controller) == (Standing.LIVE, False)
        killed_s = time.monotonic()
        killed.kill()
        async with asyncio.timeout(5.0):
            while await standing(controller) != (Standing.DEAD, True):
                await asyncio.sleep(0.001)
        assert time.monotonic() - killed_s < 1.0
        await killed.wait()
        await client.report(state("a", 2))
        assert await standing(controller) == (Standing.LIVE, False)

    played(play)


def test_port_that_is_closed_loses_no_replica_and_a_new_one_is_attended() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await client.report(state("a"))
        while not controller.calls.attending["a"]:
            await asyncio.sleep(0.01)
        await controller.listener.close()
        assert controller.calls.attending["a"] == 0
        assert await standing(controller) == (Standing.LIVE, False)
        await controller.start()
        for sequence in (2, 3):
            # The first learns of the new place.
            await client.report(state("a", sequence))
        async with asyncio.timeout(5.0):
            while not controller.calls.attending["a"]:
                await asyncio.sleep(0.01)

    played(play)
