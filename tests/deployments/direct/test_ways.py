"""Calls to the controller's own port, and by its handle where that is closed."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from dps_deployments import controller_client, direct_client
from dps_deployments import direct_calls as direct_calls_module
from dps_deployments.controller_client import (
    CALL_TIMEOUT_S,
    ControllerClient,
    ControllerUnavailableError,
)
from dps_deployments.direct_calls import DirectCalls
from dps_deployments.direct_client import TIMEOUTS
from dps_deployments.listener import Listener
from ray.exceptions import ActorDiedError, RayTaskError

from dps_ray.fleet.backoff import Backoff
from dps_ray.fleet.coordinator import Reply
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.tally import RouterReport
from dps_ray.fleet.ways import Ways

from ... import played_time
from .play import PlayedController, played, state


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


def test_network_that_swallows_everything_leaves_time_for_the_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller_client, "CALL_TIMEOUT_S", CALL_TIMEOUT_S)
    monkeypatch.setattr(direct_client, "TIMEOUTS", TIMEOUTS)

    class Swallowed(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(request.extensions["timeout"]["connect"])
            raise httpx.ConnectTimeout("")

    async def play(controller: PlayedController, client: ControllerClient) -> None:
        client._direct._transport = Swallowed()  # type: ignore[assignment]
        reply = Reply.model_validate(await client.report(state("a")))
        assert reply.verdict.accepted

    played(play, lambda playing: played_time.run(monkeypatch, playing))


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
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await client.report(state("a"))

        async def slow(path: str, body: bytes, receive: Any) -> Any:
            """Answers nothing until the caller has gone."""
            await receive()

        with monkeypatch.context() as patch:
            patch.setattr(controller.direct, "_call", slow)
            patch.setattr(controller_client, "CALL_TIMEOUT_S", 0.3)
            with pytest.raises(ControllerUnavailableError):
                await client.report(state("a", 2))
        await client.report(state("a", 3))
        assert controller.by_handle == ["direct_access"]

    played(play)
