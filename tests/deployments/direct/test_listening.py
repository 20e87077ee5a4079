"""Routers that listen for publications."""

import asyncio
import itertools
import time
from typing import Any

import pytest
from dps_deployments.controller_client import ControllerClient
from dps_deployments.fleet_calls import GATHER_S

from dps_ray.fleet.state import ReplicaState

from ... import played_time
from .play import PlayedController, played, state


async def start_listening(
    controller: PlayedController, client: ControllerClient
) -> asyncio.Task[dict[str, Any] | None]:
    """A router that waits for the version after the first."""
    await client.report(state("a"))
    first = await client.listen(None, 1.0)
    assert first is not None
    listening = asyncio.create_task(client.listen(first["snapshot"]["version"], 20.0))
    while controller.calls.listeners == 0:
        await asyncio.sleep(0.01)
    return listening


def test_router_that_has_gone_listens_no_longer() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        async with asyncio.timeout(60.0):
            listening = await start_listening(controller, client)
            listening.cancel()
            while controller.calls.listeners == 1:
                await asyncio.sleep(0.01)

    played(play)


def test_router_that_listens_goes_on_by_the_handle_when_the_port_closes(said: list[str]) -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        async with asyncio.timeout(60.0):
            listening = await start_listening(controller, client)
            controller.access = None
            await controller.listener.close()
            while "listen" not in controller.by_handle:
                await asyncio.sleep(0.01)
            await client.report(state("b"))
            assert await listening is not None

    played(play)
    assert said == []


def test_router_gets_fifty_publications_a_second_at_most_and_the_first_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
        assert quiet < 3
        # A change is reported every millisecond.
        assert len(told[quiet][1]) == 1
        gaps_s = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(told[quiet:])]
        assert gaps_s == pytest.approx([GATHER_S] * len(gaps_s))
        assert {len(names) for _, names in told[quiet + 1 :]} <= {19, 20, 21}

    played_time.run(monkeypatch, run())
