"""Replicas and routers that are played: actors that call a controller as real ones do.

Times are monotonic seconds, the same in every process of a host.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dps_deployments.controller_client import (
    ControllerClient,
    ControllerUnavailableError,
    retries,
)
from dps_deployments.ray_adapter import resolve_method

from dps_ray.fleet_cost.controller import TRANSITION_EVERY, wire_state
from dps_ray.modes import Mode

STARTING = 4
START_TIMEOUT_S = 60.0
LISTEN_S = 1.0


@dataclass(frozen=True)
class Played:
    """What the replicas of one process saw."""

    trips_ms: Any
    """From each report's sending to its reply."""
    refused: int
    """Calls that were not answered in time."""
    busy_s: float
    """Processor time of the process."""


@dataclass(frozen=True)
class Heard:
    """What the routers of one process heard."""

    publications: int
    ages_ms: Any
    """Of every entry of every publication, since its report was sent."""
    refused: int
    busy_s: float


class _SharedHandles:
    """Finds each handle once for all clients of a process."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], asyncio.Task[Any]] = {}

    async def __call__(self, app: str, deployment: str, method: str) -> Any:
        name = app, deployment, method
        if name not in self._found:
            self._found[name] = asyncio.create_task(resolve_method(*name))
        # One caller that gives up must not end it for the others.
        return await asyncio.shield(self._found[name])


class Player:
    """Some replicas; an actor."""

    def __init__(self, controller_app: str, numbers: Sequence[int]) -> None:
        rng = np.random.default_rng(0)
        self._states = {
            number: [
                {**wire_state(number, 0, rng), "mode": mode.value, "restoring": False}
                for mode in (Mode.FULL, Mode.FAST)
            ]
            for number in numbers
        }
        share = _SharedHandles()
        # A connection for each, as of replicas in processes of their own; Serve's handles are
        # shared, because each of them costs its process more than all else here.
        self._clients = {
            number: ControllerClient(controller_app, f"played replica {number}", share)
            for number in numbers
        }
        self._trips_ms: list[float] = []
        self._refused = 0

    async def ready(self) -> None:
        """Return once the controller has answered all, few at a time: a fleet starts slowly."""
        turns = asyncio.Semaphore(STARTING)

        async def start(number: int) -> None:
            pauses = retries()
            while True:
                try:
                    async with turns:
                        await self._clients[number].report(
                            {**self._states[number][0], "sequence": 0}
                        )
                    return
                except ControllerUnavailableError:
                    await asyncio.sleep(pauses.failed())

        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.gather(*(start(number) for number in self._states))

    async def play(self, begin_s: float, window: tuple[float, float]) -> Played:
        """Report from ``begin_s`` to the window's end; what was answered within it counts."""
        await asyncio.sleep(max(0.0, begin_s - time.monotonic()))
        playing = [
            asyncio.create_task(self._replica(number, begin_s, window)) for number in self._states
        ]
        await asyncio.sleep(max(0.0, window[0] - time.monotonic()))
        before_s = time.process_time()
        await asyncio.sleep(max(0.0, window[1] - time.monotonic()))
        busy_s = time.process_time() - before_s
        await asyncio.gather(*playing)
        return Played(np.array(self._trips_ms), self._refused, busy_s)

    async def _replica(self, number: int, begin_s: float, window: tuple[float, float]) -> None:
        rng = random.Random(number)
        due_s = begin_s + rng.random()
        sequence = rng.randrange(TRANSITION_EVERY)
        pauses = retries()
        while due_s < window[1]:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            sequence += 1
            state = self._states[number][sequence // TRANSITION_EVERY % 2]
            sent_s = time.monotonic()
            try:
                await self._clients[number].report(
                    {**state, "sequence": sequence, "sent_at_s": sent_s},
                )
            except ControllerUnavailableError:
                self._refused += 1
                await asyncio.sleep(pauses.failed())
                continue
            pauses.succeeded()
            now_s = time.monotonic()
            if window[0] <= now_s < window[1]:
                self._trips_ms.append((now_s - sent_s) * 1e3)
            # As a replica does it: the next heartbeat counts from the delivery of this one.
            due_s = max(due_s + 1.0, now_s)


class Listener:
    """Some routers that only listen; an actor."""

    def __init__(self, controller_app: str) -> None:
        self._client = ControllerClient(controller_app, caller="played routers")
        self._publications = self._refused = 0
        self._ages_ms: list[float] = []

    async def ready(self) -> None:
        """Return once the controller has answered."""
        await self._client.listen(None, LISTEN_S)

    async def listen(self, routers: int, window: tuple[float, float]) -> Heard:
        """Listen to the window's end; what was heard within it counts."""
        listening = [asyncio.create_task(self._router(window)) for _ in range(routers)]
        await asyncio.sleep(max(0.0, window[0] - time.monotonic()))
        before_s = time.process_time()
        await asyncio.sleep(max(0.0, window[1] - time.monotonic()))
        busy_s = time.process_time() - before_s
        await asyncio.gather(*listening)
        return Heard(self._publications, np.array(self._ages_ms), self._refused, busy_s)

    async def _router(self, window: tuple[float, float]) -> None:
        version = None
        pauses = retries()
        while time.monotonic() < window[1]:
            try:
                publication = await self._client.listen(version, LISTEN_S)
            except ControllerUnavailableError:
                self._refused += 1
                await asyncio.sleep(pauses.failed())
                continue
            pauses.succeeded()
            if publication is None:
                continue
            snapshot, now_s = publication["snapshot"], time.monotonic()
            if version is not None and window[0] <= now_s < window[1]:
                self._publications += 1
                self._ages_ms += [
                    (now_s - entry["state"]["sent_at_s"]) * 1e3 for entry in snapshot["entries"]
                ]
            version = snapshot["version"]
