"""When a replica looks for a hang, and when it ends its engine itself; on a played engine."""

import asyncio
from typing import Any

import pytest
from dps_deployments import server
from dps_deployments.probe import ReplicaProbe
from dps_deployments.ray_adapter import ReplicaIdentity
from dps_deployments.server import DpsLLMServer
from ray.serve.llm import LLMServer

from dps_ray.fleet.permits import ReplicaPermits


class Unstarted(DpsLLMServer):
    def __del__(self) -> None:
        """Without an engine there is nothing to end."""


class Replica:
    """A real server around a real probe, without an engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = self.kills = 0
        self.hang: str | None = None
        self.health: Exception | None = None
        self.torn = False
        self.server: Any = Unstarted.__new__(Unstarted)
        identity = ReplicaIdentity("r1", "llm#model", "node")
        probe = ReplicaProbe(identity, "1", ReplicaPermits("r1", 0.0), lambda: False)
        self.server._probe, self.server._hangs, self.server._page = probe, self, self
        probe.engine_started(lambda: False, self.server._read_page, lambda: True)
        monkeypatch.setattr(LLMServer, "check_health", self._check)
        monkeypatch.setattr(server, "kill_engine", self._kill)

    def look(self) -> str | None:
        self.looks += 1
        return self.hang

    def read(self) -> None:
        if self.torn:
            raise RuntimeError("status page never settles")

    def check(self) -> None:
        """One health check of Serve's."""

        async def run() -> None:
            self.server._reports = asyncio.get_running_loop().create_future()
            await self.server.check_health()

        asyncio.run(run())

    async def _check(self, *_: Any) -> None:
        if self.health is not None:
            raise self.health

    def _kill(self) -> None:
        self.kills += 1


def test_engine_that_hangs_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(monkeypatch)
    replica.check()
    assert (replica.looks, replica.kills) == (1, 0)
    replica.hang = "it hangs"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="engine is dead: it hangs"):
            replica.check()
    assert (replica.looks, replica.kills) == (2, 1)


def test_engine_that_is_dead_already_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(monkeypatch)
    replica.health = ValueError("gone")
    with pytest.raises(RuntimeError, match="engine is dead: ValueError: gone"):
        replica.check()
    assert (replica.looks, replica.kills) == (0, 0)


def test_engine_that_was_stopped_while_it_wrote_its_page_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica(monkeypatch)
    replica.torn = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="engine is dead: status page never settles"):
            replica.check()
    assert (replica.looks, replica.kills) == (0, 1)
