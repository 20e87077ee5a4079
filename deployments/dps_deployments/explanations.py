"""Answers of the controller to why a request goes, or went, to a replica and not to another."""

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException

from dps_ray.choices import choose
from dps_ray.fleet.ask import Ask
from dps_ray.fleet.coordinator import Coordinator
from dps_ray.fleet.explain import DRAWING, explain, ranked
from dps_ray.fleet.policies import POLICIES, Policy
from dps_ray.fleet.publication import ControllerOptions
from dps_ray.fleet.recent import MAX_CANDIDATES, MAX_REQUESTS, Told
from dps_ray.fleet.tally import RouterReport

ANSWER_PERIOD_S = 0.25
"""An answer about 1,000 replicas takes the controller some 55 ms: it gives no more than these."""
MAX_WAITING = 16
"""Callers that ask about past requests at once, the same one or different ones."""
LOOK_UP_S = 3.0
"""Routers report once a second, and again when they have found something."""


@dataclass
class _LookUp:
    """A past request that somebody asks about."""

    told: asyncio.Future[Told]
    callers: int = 0


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
        self._turn = asyncio.Lock()
        self._wanted: dict[str, _LookUp] = {}

    def take(self, report: RouterReport) -> tuple[RouterReport, list[str]]:
        """A router's report without the answers in it, and the requests to be looked up."""
        for told in report.found:
            look_up = self._wanted.get(told.request_id or "")
            if look_up is not None and not look_up.told.done():
                look_up.told.set_result(told)
        wanted = [name for name, look_up in self._wanted.items() if not look_up.told.done()]
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
        left_s = self._left_s()
        if left_s > 0.0:
            raise HTTPException(
                429,
                f"one answer in {ANSWER_PERIOD_S} s: ask again",
                {"Retry-After": str(math.ceil(left_s))},
            )
        self._answered_at_s = time.monotonic()
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

        Answers wait for their turn: they cost as much as those of ``would``.

        Raises
        ------
        HTTPException
            404 when no router does, or for an unknown replica, 429 when too many ask at once.
        """
        if sum(look_up.callers for look_up in self._wanted.values()) >= MAX_WAITING:
            raise HTTPException(429, "others ask about requests: ask again", {"Retry-After": "3"})
        future = asyncio.get_running_loop().create_future()
        look_up = self._wanted.setdefault(request_id, _LookUp(future))
        look_up.callers += 1
        try:
            async with asyncio.timeout(LOOK_UP_S):
                told = await asyncio.shield(look_up.told)
            # Nobody takes a turn in advance: callers that leave meanwhile cost the others nothing.
            async with self._turn:
                while (left_s := self._left_s()) > 0.0:
                    await asyncio.sleep(left_s)
                self._answered_at_s = time.monotonic()
        except TimeoutError:
            raise HTTPException(404, self._forgotten(request_id)) from None
        finally:
            look_up.callers -= 1
            if not look_up.callers:
                del self._wanted[request_id]
        drawn = told.policy in DRAWING
        candidates = ranked(told.order, told.reasons, drawn=drawn)
        answer = {
            **told.model_dump(mode="json", exclude={"reasons"}),
            "choice": told.order[0] if told.order else None,
            "candidates": [each.model_dump(mode="json") for each in candidates],
        }
        return _narrowed(answer, replica, answer["choice"])

    def _left_s(self) -> float:
        """Until the next answer may be made."""
        return self._answered_at_s + ANSWER_PERIOD_S - time.monotonic()

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
            f"latest {MAX_REQUESTS} requests, fewer among more than "
            f"{MAX_CANDIDATES // MAX_REQUESTS} replicas, by the X-Request-ID of request or response"
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
        raise HTTPException(400, f"policy is {name[:80]!r}: {choose(name[:80], POLICIES)}")
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
