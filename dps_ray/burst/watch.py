"""What the fleet looks like while it scales: Serve's count of replicas, and what each says."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from dps_deployments.fleet_args import INGRESS_DEPLOYMENT
from ray import serve

from dps_ray.chaos.fleet import FLEET_APP
from dps_ray.fleet.snapshot import Standing
from dps_ray.fleet.state import ReplicaState
from dps_ray.modes import Mode

LOOK_PERIOD_S = 0.5
STOPPING, RUNNING = "STOPPING", "RUNNING"


@dataclass(frozen=True)
class Look:
    """The fleet at one moment."""

    time_s: float
    """Seconds after the first look."""
    running: int
    """Replicas that serve, as Serve counts them."""
    target: int
    """Replicas that Serve wants: running and starting ones."""
    stopping: int
    states: Mapping[str, ReplicaState]
    """What the replicas in service have said of themselves last."""
    leaving: frozenset[str]
    """Replicas that have been told to stop."""

    @property
    def fast(self) -> int:
        return sum(state.mode is Mode.FAST for state in self.states.values())

    @property
    def queued(self) -> int:
        """Requests waiting in the engines."""
        return sum(state.waiting or 0 for state in self.states.values())

    @property
    def demand_blocks(self) -> int:
        return sum(state.used_blocks or 0 for state in self.states.values())


def look_of(status: Mapping[str, Any], counts: Mapping[str, int], time_s: float) -> Look:
    """Put the controller's ``GET /dps/status`` and Serve's counts of replicas together.

    Parameters
    ----------
    status
        The controller's answer.
    counts
        Replicas of the deployment by Serve's name of their state.
    time_s
        Seconds after the first look.
    """
    stopping = counts.get(STOPPING, 0)
    entries = {entry["replica_id"]: entry for entry in status["replicas"]}
    return Look(
        time_s=time_s,
        running=counts.get(RUNNING, 0),
        target=sum(counts.values()) - stopping,
        stopping=stopping,
        states={
            name: ReplicaState.model_validate(entry["state"])
            for name, entry in entries.items()
            if entry["standing"] == Standing.LIVE
        },
        leaving=frozenset(
            name for name, entry in entries.items() if entry["standing"] == Standing.DRAINING
        ),
    )


class Watch:
    """Looks in the background; the process must be connected to the fleet's Ray.

    Parameters
    ----------
    http
        Client of the fleet's HTTP server.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.looks: list[Look] = []
        self._http = http
        self._started_s = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds on the clock of the looks."""
        return time.perf_counter() - self._started_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look within the block, which ends at once where that fails.

        Raises
        ------
        ExceptionGroup
            Ray does not tell the counts of replicas, or the block itself raised.
        """
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look())
            yield
            looking.cancel()

    async def _look(self) -> None:
        while True:
            # Nothing is killed here: an answer that fails to come in two seconds is only late, and
            # what Serve refuses under load the next look gets.
            with suppress(httpx.HTTPError):
                response = await self._http.get("/dps/status", timeout=2.0)
                status = response.raise_for_status().json()
                counts = await asyncio.to_thread(_counts)
                self.looks.append(look_of(status, counts, self.now_s))
            await asyncio.sleep(LOOK_PERIOD_S)


def _counts() -> dict[str, int]:
    """Replicas of the model's deployment by state."""
    deployments = serve.status().applications[FLEET_APP].deployments
    (model,) = (of for name, of in deployments.items() if name != INGRESS_DEPLOYMENT)
    return {str(getattr(state, "value", state)): n for state, n in model.replica_states.items()}
