"""Answers of the controller to why a request goes, or went, to a replica and not to another."""

import asyncio
import time
from typing import Any

from fastapi import HTTPException

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.coordinator import Coordinator
from dps_ray.fleet.explain import DRAWING, explain, ranked
from dps_ray.fleet.policies import (
    FullFirst,
    LeastPressure,
    ModeAware,
    Policy,
    PowerOfTwo,
    RoundRobin,
)
from dps_ray.fleet.publication import ControllerOptions
from dps_ray.fleet.recent import MAX_REQUESTS, Told
from dps_ray.fleet.tally import RouterReport

ANSWER_PERIOD_S = 0.25
"""An answer about 1,000 replicas takes the controller some 55 ms: it gives no more than these."""
MAX_WANTED = 16
LOOK_UP_S = 3.0
"""Routers report once a second, and again when they have found something."""
POLICIES = {
    kind().name: kind for kind in (RoundRobin, PowerOfTwo, LeastPressure, ModeAware, FullFirst)
}


class Explanations:
    """What a request would meet, by the controller's view, and what one met, by its router's.

    Parameters
    ----------
    coordinator
        The controller's core.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._answered_at_s = float("-inf")
        self._wanted: dict[str, asyncio.Future[Told]] = {}

    def take(self, report: RouterReport) -> tuple[RouterReport, list[str]]:
        """A router's report without the answers in it, and the requests to be looked up."""
        for told in report.found:
            waiter = self._wanted.get(told.request_id or "")
            if waiter is not None and not waiter.done():
                waiter.set_result(told)
        wanted = [name for name, waiter in self._wanted.items() if not waiter.done()]
        return report.model_copy(update={"found": ()}), wanted

    def would(
        self, ask: Ask, *, application: str | None, policy: str | None, replica: str | None
    ) -> dict[str, Any]:
        """Where such a request would go now.

        Raises
        ------
        HTTPException
            400 for names that mean nothing here, 404 for an unknown replica, 429 when asked too
            often.
        """
        self._count()
        self._coordinator.tick()
        options = self._coordinator.options
        answer = explain(
            self._coordinator.aggregate.snapshot(),
            [report for _, report in self._coordinator.routers.reports()],
            application=self._application(application),
            policy=_policy(policy, options),
            freshness=options.ageing,
            ask=ask,
        )
        return _narrowed(answer.model_dump(mode="json"), replica, answer.choice)

    async def did(self, request_id: str, *, replica: str | None) -> dict[str, Any]:
        """Where a request went, as long as its router remembers it.

        Raises
        ------
        HTTPException
            404 when no router does, or for an unknown replica, 429 when too many ask at once.
        """
        if len(self._wanted) >= MAX_WANTED:
            raise HTTPException(429, "others ask about requests: ask again", {"Retry-After": "3"})
        waiter = self._wanted.setdefault(request_id, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(LOOK_UP_S):
                told = await asyncio.shield(waiter)
        except TimeoutError:
            raise HTTPException(404, self._forgotten(request_id)) from None
        finally:
            self._wanted.pop(request_id, None)
        drawn = told.policy in DRAWING
        candidates = ranked(told.order, told.reasons, drawn=drawn)
        answer = {
            **told.model_dump(mode="json", exclude={"reasons"}),
            "choice": told.order[0] if told.order else None,
            "candidates": [each.model_dump(mode="json") for each in candidates],
        }
        return _narrowed(answer, replica, answer["choice"])

    def _count(self) -> None:
        now_s = time.monotonic()
        if now_s - self._answered_at_s < ANSWER_PERIOD_S:
            raise HTTPException(
                429, f"one answer in {ANSWER_PERIOD_S} s: ask again", {"Retry-After": "1"}
            )
        self._answered_at_s = now_s

    def _application(self, name: str | None) -> str:
        entries = self._coordinator.aggregate.snapshot().entries
        known = {entry.state.application for entry in entries if entry.state is not None}
        known |= {report.application for _, report in self._coordinator.routers.reports()}
        names = sorted(each for each in known if each is not None)
        if name is None and len(names) == 1:
            return names[0]
        if name is None or name not in names:
            raise HTTPException(
                400, f"application is {name!r}: known are {', '.join(names) or 'none'}"
            )
        return name

    def _forgotten(self, request_id: str) -> str:
        count = len(self._coordinator.routers.reports())
        return (
            f"none of {count} routers remembers request {request_id[:80]!r}: a router keeps its "
            f"latest {MAX_REQUESTS} requests, fewer with hundreds of replicas, by the X-Request-ID "
            "of request or response"
        )


def _policy(name: str | None, options: ControllerOptions) -> Policy:
    """The policy of that name as it is set, or with its defaults where it is not."""
    if name is None:
        return options.routing
    tried = [options.dry_run.policy] if options.dry_run is not None else []
    for policy in (options.routing, *tried):
        if policy.name == name:
            return policy
    if name not in POLICIES:
        raise HTTPException(400, f"policy is {name[:80]!r}: give one of {', '.join(POLICIES)}")
    return POLICIES[name]()


def _narrowed(answer: dict[str, Any], replica: str | None, choice: str | None) -> dict[str, Any]:
    """Only one replica and the one in the first place, where one is asked for."""
    if replica is None:
        return answer
    names = [each["replica_id"] for each in answer["candidates"]]
    if replica not in names:
        known = ", ".join(names[:20]) or "none"
        raise HTTPException(404, f"replica is {replica[:80]!r}: candidates are {known}")
    kept = [each for each in answer["candidates"] if each["replica_id"] in (replica, choice)]
    return {**answer, "candidates": kept}
