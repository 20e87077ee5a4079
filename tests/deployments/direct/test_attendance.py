"""The connection that a replica keeps open, by whose end the controller sees its death."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest
from dps_deployments.attendance import Attendance
from dps_deployments.controller_client import ControllerClient
from dps_deployments.direct_calls import DirectCalls
from dps_deployments.direct_client import DirectClient, UnreachableError
from dps_deployments.listener import Listener

from dps_ray.fleet.publication import Publication
from dps_ray.fleet.snapshot import Entry, Standing
from dps_ray.fleet.ways import Access

from .play import PlayedController, played, state

ATTEND = """
import asyncio
from dps_deployments.direct_client import DirectClient
from dps_ray.fleet.ways import Access
asyncio.run(DirectClient().call(Access({url!r}, {secret!r}), "attend", ("a",)))
"""


async def until(condition: Callable[[], bool]) -> int:
    """Wait for a condition, and return how often it was looked at, each millisecond at most.

    Unlike seconds, looks do not pass while this process stands still.
    """
    looks = 1
    async with asyncio.timeout(120.0):
        while not condition():
            looks += 1
            await asyncio.sleep(0.001)
    return looks


async def told_of(controller: PlayedController) -> Entry:
    """The only replica, as routers are told."""
    published = await controller.calls.listen(None, 0.0)
    (entry,) = Publication.model_validate(published).snapshot.entries
    return entry


async def attend(controller: PlayedController, client: ControllerClient) -> None:
    """A replica reports, and keeps a connection open."""
    await client.report(state("a"))
    await until(lambda: controller.calls.attending["a"] == 1)


def connections(listener: Listener) -> list[Any]:
    server = listener._server
    assert server is not None
    return list(server.server_state.connections)


def test_replica_whose_process_is_killed_is_published_as_dead_at_once() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        access = controller.access
        assert access is not None
        await client.report(state("a"))
        script = ATTEND.format(url=access.url, secret=access.secret)
        killed = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        await until(lambda: controller.calls.attending["a"] == 2)
        # While another connection of the replica is open it has not gone.
        client._attendance.keep(None, "a")
        await until(lambda: controller.calls.attending["a"] == 1)
        await client.report(state("a", 2))
        assert (await told_of(controller)).standing is Standing.LIVE
        client._attendance.keep(None, "a")
        await until(lambda: controller.calls.attending["a"] == 1)
        before = controller.calls._coordinator.aggregate.version
        killed.kill()
        looks = await until(lambda: controller.calls._coordinator.aggregate.version > before)
        assert looks < 1000
        lost = await told_of(controller)
        assert lost.standing is Standing.DEAD
        assert lost.lost_ago_s is not None
        await killed.wait()
        await client.report(state("a", 3))
        assert (await told_of(controller)).standing is Standing.LIVE

    played(play)


def test_replica_that_lives_says_so_when_its_connection_breaks() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await attend(controller, client)
        assert not client.is_cut_off
        # As a firewall does that forgets connections.
        for connection in connections(controller.listener):
            connection.transport.abort()
        await until(lambda: client.is_cut_off)
        assert (await told_of(controller)).standing is Standing.DEAD
        await client.report(state("a", 2))
        assert not client.is_cut_off
        assert (await told_of(controller)).standing is Standing.LIVE
        await until(lambda: controller.calls.attending["a"] == 1)

    played(play)


def test_port_that_is_closed_loses_no_replica_and_a_new_one_is_attended() -> None:
    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await attend(controller, client)
        await controller.listener.close()
        assert not controller.calls.attending
        assert (await told_of(controller)).standing is Standing.LIVE
        await controller.start()
        for sequence in (2, 3):
            # The first learns of the new place.
            await client.report(state("a", sequence))
        await until(lambda: controller.calls.attending["a"] == 1)

    played(play)


def test_controller_that_vanished_without_a_word_holds_nobody() -> None:
    """Its connection never ends; the next controller answers."""

    async def play(controller: PlayedController, client: ControllerClient) -> None:
        await attend(controller, client)
        vanished = controller.listener
        controller.direct = DirectCalls(controller.calls)
        controller.listener = Listener(
            controller.direct, section="direct", purpose="calls", keep_alive_s=60
        )
        await controller.start()
        assert client._ways.access is not None
        client._ways.lost(client._ways.access)
        await client.report(state("a", 2))
        await until(lambda: not connections(vanished))
        await until(lambda: controller.calls.attending["a"] == 1)
        await vanished.close()

    played(play)


def test_controller_of_an_older_release_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def call(self: DirectClient, access: Access, method: str, args: object) -> None:
        asked.append(method)
        raise UnreachableError("attend: 404", 404)

    monkeypatch.setattr(DirectClient, "call", call)

    async def run() -> None:
        attendance = Attendance(DirectClient())
        for _ in range(3):
            attendance.keep(Access("http://192.0.2.1:1", "secret"), "a")
            await asyncio.sleep(0.3)
        assert not attendance.is_broken

    asyncio.run(run())
    assert asked == ["attend"]
