"""The ingress's queue: urgent requests first, shedding, and clients that leave while they wait."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from dps_deployments.beside import Beside
from dps_deployments.ingress_queue import IngressQueue
from dps_deployments.refusals import OverloadedError

from dps_ray.fleet.admission import AdmissionOptions


def figures(places: int, max_waiting: int = 2) -> Beside:
    options = AdmissionOptions(max_waiting=max_waiting, min_retry_after_s=3.0)
    return Beside(admission=options, places=places)


class Clients:
    """Requests at one queue, and the order in which they were let through."""

    def __init__(self, queue: IngressQueue) -> None:
        self.queue = queue
        self.through: list[str] = []
        self.end = asyncio.Event()

    def send(
        self, name: str, priority: int = 0, wait_s: float | None = None
    ) -> "asyncio.Task[None]":
        async def one() -> None:
            async with self.queue.place(priority, wait_s) as served:
                self.through.append(name)
                await self.end.wait()
                served()

        return asyncio.create_task(one())


def scenario(
    beside: Beside, ingress_replicas: int = 1
) -> Callable[[Callable[[Clients], Coroutine[Any, Any, None]]], None]:
    def run(body: Callable[[Clients], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            await body(Clients(IngressQueue(lambda: beside, ingress_replicas, lambda: 0.0)))

        asyncio.run(asyncio.wait_for(main(), 20.0))

    return run


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_urgent_request_overtakes_and_the_least_urgent_is_shed() -> None:
    async def body(clients: Clients) -> None:
        tasks = {name: clients.send(name, p) for name, p in [("runs", 0), ("a", 0), ("lazy", 9)]}
        await settle()
        tasks["urgent"] = clients.send("urgent", -1)
        await settle()
        with pytest.raises(OverloadedError) as raised:
            await tasks.pop("lazy")
        assert raised.value.status_code == 503
        assert raised.value.retry_after_s == 3.0
        with pytest.raises(OverloadedError):
            await clients.send("too late")
        clients.end.set()
        await asyncio.gather(*tasks.values())
        assert clients.through == ["runs", "urgent", "a"]

    scenario(figures(places=1))(body)


def test_request_is_served_at_once_where_nobody_may_wait() -> None:
    async def body(clients: Clients) -> None:
        first = clients.send("first")
        with pytest.raises(OverloadedError):
            await clients.send("second")
        clients.end.set()
        await first

    scenario(figures(places=1, max_waiting=0))(body)


def test_client_that_leaves_while_it_waits_or_runs_makes_room() -> None:
    async def body(clients: Clients) -> None:
        tasks = [clients.send(name) for name in ("runs", "waits", "next")]
        await settle()
        tasks[1].cancel()
        tasks[0].cancel()
        await settle()
        assert clients.through == ["runs", "next"]
        clients.end.set()
        await tasks[2]

    scenario(figures(places=1))(body)


def test_request_waits_no_longer_than_it_says() -> None:
    async def body(clients: Clients) -> None:
        runs = clients.send("runs")
        with pytest.raises(OverloadedError):
            await clients.send("impatient", wait_s=0.02)
        clients.end.set()
        await runs
        await clients.send("again", wait_s=0.02)

    scenario(figures(places=1))(body)


def test_request_that_others_keep_overtaking_is_refused_in_the_operators_time() -> None:
    admission = AdmissionOptions(queue_wait_s=0.05)

    async def body(clients: Clients) -> None:
        runs = clients.send("runs")
        with pytest.raises(OverloadedError):
            await clients.send("starves", priority=9)
        with pytest.raises(OverloadedError):
            await clients.send("asks for more", wait_s=60.0)
        clients.end.set()
        await runs

    scenario(Beside(admission=admission, places=1))(body)


def test_request_that_has_waited_long_enough_is_overtaken_no_more() -> None:
    now_s = 0.0

    async def run() -> None:
        nonlocal now_s
        beside = figures(places=1, max_waiting=9)
        clients = Clients(IngressQueue(lambda: beside, clock=lambda: now_s))
        ageing_s = beside.admission.priority_ageing_s
        tasks = [clients.send("runs"), clients.send("old", 1)]
        await settle()
        now_s = 0.9 * ageing_s
        tasks.append(clients.send("in time", 0))
        await settle()
        now_s = 1.1 * ageing_s
        tasks.append(clients.send("too late", 0))
        await settle()
        clients.end.set()
        await asyncio.gather(*tasks)
        assert clients.through == ["runs", "in time", "old", "too late"]

    asyncio.run(run())


def test_places_of_a_new_replica_are_filled_though_nobody_comes_or_leaves() -> None:
    beside = figures(places=1)

    async def body(clients: Clients) -> None:
        tasks = [clients.send(str(n)) for n in range(3)]
        await settle()
        assert clients.through == ["0"]
        beside.places = 2
        while len(clients.through) < 2:
            await asyncio.sleep(0.01)
        assert clients.through == ["0", "1"]
        clients.end.set()
        await asyncio.gather(*tasks)

    scenario(beside)(body)


def test_retry_after_is_what_waits_over_the_rate_of_what_was_served_not_of_what_was_refused() -> (
    None
):
    async def body(clients: Clients) -> None:
        clients.end.set()
        for _ in range(2):
            await clients.send("served")
        clients.end.clear()
        runs, *waiting = [clients.send(str(n)) for n in range(8)]
        await settle()
        for _ in range(50):
            with pytest.raises(OverloadedError):
                await clients.send("refused")
        with pytest.raises(OverloadedError) as raised:
            await clients.send("refused")
        # Seven wait and two were served within the first second.
        assert raised.value.retry_after_s == 4.0
        clients.end.set()
        await asyncio.gather(runs, *waiting)

    scenario(figures(places=1, max_waiting=7))(body)


@pytest.mark.parametrize(
    ("places", "ingress_replicas", "expected"), [(0, 1, 20), (3, 1, 3), (8, 2, 5), (1, 4, 1)]
)
def test_as_many_pass_as_the_replicas_have_places_for_this_ingress(
    places: int, ingress_replicas: int, expected: int
) -> None:
    async def body(clients: Clients) -> None:
        tasks = [clients.send(str(n)) for n in range(20)]
        await settle()
        assert len(clients.through) == expected
        clients.end.set()
        await asyncio.gather(*tasks)

    scenario(figures(places, max_waiting=20), ingress_replicas)(body)


def test_no_more_pass_the_queue_than_may_wait_in_it() -> None:
    async def body(clients: Clients) -> None:
        with clients.queue.aside(), clients.queue.aside():
            with pytest.raises(OverloadedError), clients.queue.aside():
                pass
            clients.end.set()
            await clients.send("takes the place")
        with clients.queue.aside():
            pass

    scenario(figures(places=1))(body)
