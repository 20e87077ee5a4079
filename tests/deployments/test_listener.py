"""Ports of the controller's own: taken, freed, moved and closed while it runs."""

import asyncio
import socket
from typing import Any

import httpx
from dps_deployments.listener import Listener

from dps_ray.demo.serve_config import free_port
from dps_ray.fleet.publication import AdminOptions


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def place(port: int, **changes: Any) -> tuple[str, int] | None:
    return AdminOptions(**{"token_env": "SOME_TOKEN", "port": port, **changes}).place


def made() -> Listener:
    return Listener(app, section="admin", purpose="admin calls", keep_alive_s=2)


async def answers(port: int) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
            return (await client.get(f"http://127.0.0.1:{port}/")).status_code == 204
    except httpx.TransportError:
        return False


async def listening(listener: Listener) -> None:
    async with asyncio.timeout(60.0):
        while listener.address is None:
            await asyncio.sleep(0.01)


def test_listener_moves_with_its_options_and_closes_with_the_token() -> None:
    async def run() -> None:
        first, second = free_port(), free_port()
        listener = made()
        await listener.apply(place(first, token_env=None))
        assert listener.address is None
        await listener.apply(place(first))
        await listening(listener)
        assert listener.address == f"127.0.0.1:{first}"
        assert await answers(first)
        await listener.apply(place(second))
        await listening(listener)
        assert await answers(second)
        assert not await answers(first)
        await listener.apply(place(second, token_env=None))
        assert listener.address is None
        assert not await answers(second)

    asyncio.run(run())


def test_taken_port_is_named_and_used_as_soon_as_it_is_free() -> None:
    async def run() -> None:
        listener = made()
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            await listener.apply(place(port))
            await asyncio.sleep(0)
            assert listener.address is None
            assert f"admin.port is {port}: another process" in str(listener.fault)
        await listening(listener)
        assert listener.fault is None
        assert await answers(port)
        await listener.close()
        assert not await answers(port)

    asyncio.run(run())


def test_address_of_no_interface_is_named() -> None:
    async def run() -> None:
        listener = made()
        await listener.apply(place(free_port(), host="192.0.2.1"))
        await asyncio.sleep(0)
        assert "admin.host is '192.0.2.1'" in str(listener.fault)
        await listener.close()

    asyncio.run(run())
