"""The queue of one ingress replica: requests pass it before they are sent to a replica."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator

from dps_deployments.beside import Beside
from dps_deployments.refusals import overloaded
from dps_ray.fleet.admission import DrainRate, retry_after_s
from dps_ray.fleet.waiting import PriorityQueue, Ticket, rank_of

UNEVEN = 1.25
"""Several ingress replicas share the places; one that gets more requests may take so much more."""

READMIT_PERIOD_S = 0.25
"""How often the places are looked at again while requests wait: a new replica brings some."""


def share_of(places: int, ingress_replicas: int) -> int:
    """Places on the replicas that one of so many ingress replicas may fill."""
    return places if ingress_replicas <= 1 else math.ceil(places * UNEVEN / ingress_replicas)


class IngressQueue:
    """Lets as many requests through as the replicas have places, the most urgent first.

    What is let through waits nowhere else for long, so that an urgent request overtakes all others
    that wait here; behind it Serve's queue and the replica's own are in the order of arrival, or of
    vLLM's ``priority`` policy.

    Parameters
    ----------
    figures
        The operator's bounds and the number of places, which may change.
    ingress_replicas
        How many share those places.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        figures: Callable[[], Beside],
        ingress_replicas: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._figures = figures
        self._clock = clock
        self._ingress_replicas = ingress_replicas
        self._queue = PriorityQueue()
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._aside = 0
        self._timer: asyncio.TimerHandle | None = None
        self._drain = DrainRate()

    @contextlib.asynccontextmanager
    async def place(
        self, priority: int, wait_s: float | None = None
    ) -> AsyncIterator[Callable[[], None]]:
        """Wait for a place and hold it.

        Yields what to call once the request is served. Only that counts as speed: refusals and
        clients that left say nothing of it.

        Parameters
        ----------
        priority
            Lower is sooner.
        wait_s
            Longest wait, seconds, where the operator's bound is not shorter.

        Raises
        ------
        OverloadedError
            The request is shed, or has waited for so long.
        """
        waiter = asyncio.get_running_loop().create_future()
        ageing_s = self._figures().admission.priority_ageing_s
        ticket = self._queue.arrive(rank_of(priority, self._clock(), ageing_s))
        self._waiters[ticket] = waiter
        try:
            self._admit()
            for shed in self._queue.shed(self._figures().admission.max_waiting):
                self._turn_away(shed)
            limit_s = self._figures().admission.queue_wait_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s if wait_s is None else min(wait_s, limit_s)):
                    await waiter
            if not waiter.done() or waiter.cancelled():
                raise self.refusal(self._queue.before(ticket))
            yield self._served
        finally:
            del self._waiters[ticket]
            self._queue.leave(ticket)
            self._admit()

    @contextlib.contextmanager
    def aside(self) -> Iterator[Callable[[], None]]:
        """Pass the queue, for a request that waits for a mode and must take no place meanwhile.

        Yields the same as ``place``.

        Raises
        ------
        OverloadedError
            As many have passed it as may wait in it.
        """
        if self._aside >= self._figures().admission.max_waiting:
            raise self.refusal()
        self._aside += 1
        try:
            yield self._served
        finally:
            self._aside -= 1

    def refusal(self, before: int | None = None) -> Exception:
        """The refusal of a request with so many before it; ``None``: with all that wait."""
        before = self._queue.waiting if before is None else before
        rate = self._drain.per_s(self._clock())
        later_s = retry_after_s(self._figures().admission, before, rate)
        return overloaded(self._queue.waiting + self._queue.placed + self._aside, later_s)

    def _served(self) -> None:
        self._drain.note(self._clock())

    def _admit(self) -> None:
        places = self._figures().places
        for ticket in self._queue.admit(
            share_of(places, self._ingress_replicas) if places else None
        ):
            waiter = self._waiters[ticket]
            if not waiter.done():
                waiter.set_result(None)
        if self._queue.waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(READMIT_PERIOD_S, self._readmit)

    def _readmit(self) -> None:
        self._timer = None
        self._admit()

    def _turn_away(self, ticket: Ticket) -> None:
        waiter = self._waiters[ticket]
        if not waiter.done():
            waiter.set_exception(self.refusal())
