"""Looking at a fleet in the background."""

import asyncio

import httpx
import pytest

from dps_ray.burst import watch as module
from dps_ray.burst.watch import Watch


def client(*codes: int) -> httpx.AsyncClient:
    """A fleet without replicas that answers with these codes in turn, then always with 200."""
    left = list(codes)

    def reply(_: httpx.Request) -> httpx.Response:
        return httpx.Response(left.pop(0) if left else 200, json={"replicas": []})

    return httpx.AsyncClient(transport=httpx.MockTransport(reply), base_url="http://fleet")


def test_refused_look_is_left_out_and_the_next_one_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_counts", lambda: {"RUNNING": 1})

    async def run() -> list[int]:
        async with client(503) as http:
            watch = Watch(http)
            async with asyncio.timeout(10.0), watch.running():
                while not watch.looks:
                    await asyncio.sleep(0.01)
            return [look.running for look in watch.looks]

    assert asyncio.run(run()) == [1]


def test_block_ends_at_once_when_ray_does_not_tell_the_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("Ray is gone")

    monkeypatch.setattr(module, "_counts", fail)

    async def run() -> None:
        async with client() as http, asyncio.timeout(10.0), Watch(http).running():
            await asyncio.sleep(60.0)

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(run())
    assert raised.group_contains(RuntimeError, match="Ray is gone")
