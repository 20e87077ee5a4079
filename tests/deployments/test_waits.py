"""One wait for all stages: ingress queue, router and replica together, on played engines."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from dps_deployments.beside import Beside
from dps_deployments.engine_gate import EngineGate
from dps_deployments.ingress import DpsIngress
from dps_deployments.ray_adapter import PendingRequest
from dps_deployments.refusals import BadRequestError, PrecisionUnavailableError, replica_lost
from dps_deployments.requests import ask_of, wait_of
from dps_deployments.router import DpsRouter
from ray.serve._private.common import RequestMetadata
from ray.serve.llm.ingress import OpenAiIngress

from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.modes import Mode

from .test_router import replica, routed


def body_of(**extra: Any) -> Any:
    return SimpleNamespace(vllm_xargs=extra or None, prompt="hello", stream=False, model="m")


def info_of(headers: dict[str, str]) -> Any:
    return SimpleNamespace(headers=headers)


def fast(name: str) -> Any:
    stats = {"dps": {"mode": "fast", "restoring": False, "dead": False}}
    return SimpleNamespace(**{**vars(replica(name)), "routing_stats": stats})


class Path:
    """The way of a request through the real ingress, router and gate, to a played engine."""

    def __init__(self, router: DpsRouter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.router = router
        self.mode = Mode.FAST
        self.lost = 0
        """Replicas that still have to die under the request."""
        self.tries_s: list[float] = []
        self.left_s: list[float] = []
        """The rest of the wait as the engine was told it."""
        self.ingress = DpsIngress({}, {}, application="test")
        self.ingress._beside = Beside(admission=AdmissionOptions(), places=1, serves_full=True)
        client = SimpleNamespace(generate=self._generate, errored=False)
        self._engine = SimpleNamespace(completions=self._complete, chat=self._complete)
        EngineGate(lambda: self.mode, AdmissionOptions).guard(self._engine, client)
        monkeypatch.setattr(OpenAiIngress, "_get_response", self._send)

    async def ask(self, body: Any, **headers: str) -> list[Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        asked = self.ingress._get_response(
            body=body, call_method="completions", raw_request=info_of(named)
        )
        return [response async for response in asked]

    async def _send(self, body: Any, call_method: str, raw_request: Any) -> AsyncIterator[Any]:
        self.tries_s.append(time.monotonic())
        name = str(len(self.tries_s))
        metadata = RequestMetadata(request_id=name, internal_request_id=name)
        pending = PendingRequest(args=[body, raw_request], kwargs={}, metadata=metadata)
        await self.router._choose_replica_for_request(pending)
        async for response in self._engine.completions(body, raw_request):
            yield response

    async def _complete(self, body: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        self.left_s.append(body.vllm_xargs["dps_wait_s"])
        if self.lost:
            self.lost -= 1
            raise replica_lost("the engine has ended")
        yield "answer"

    async def _generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        return
        yield


def played(
    monkeypatch: pytest.MonkeyPatch, play: Callable[[Path, DpsRouter], Awaitable[None]]
) -> None:
    async def run(router: DpsRouter) -> None:
        async with asyncio.timeout(20.0):
            await play(Path(router, monkeypatch), router)

    routed(monkeypatch, run)


@pytest.mark.parametrize("told_in", ["header", "body", "both"])
def test_queue_router_and_gate_share_one_wait(
    monkeypatch: pytest.MonkeyPatch, told_in: str
) -> None:
    """Each of them holds the request up: with waits of their own it would be nearly twice that."""
    body = body_of(dps_precision="full", **({} if told_in == "header" else {"dps_wait_s": 2.0}))
    headers = {"header": {"X_DPS_Wait_S": "2.0"}, "body": {}, "both": {"X_DPS_Wait_S": "9"}}

    async def play(path: Path, router: DpsRouter) -> None:
        router.update_replicas([fast("a")])
        began_s = time.monotonic()
        async with path.ingress._queue.place(0):
            asked = asyncio.create_task(path.ask(body, **headers[told_in]))
            await asyncio.sleep(0.8)
        await asyncio.sleep(0.8)
        assert len(path.tries_s) == 1
        # For the router the replica may serve it now, for the gate it is still in fast mode.
        router.update_replicas([replica("b")])
        with pytest.raises(PrecisionUnavailableError):
            await asked
        # A wait that began at the gate would end after 3.6 s; Serve looks now and then.
        assert 2.0 <= time.monotonic() - began_s < 2.5
        assert path.left_s == []

    played(monkeypatch, play)


def test_next_try_has_what_the_first_has_left_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(path: Path, router: DpsRouter) -> None:
        router.update_replicas([replica("a")])
        path.lost = 1
        began_s = time.monotonic()
        asked = asyncio.create_task(path.ask(body_of(), X_DPS_Precision="full", X_DPS_Wait_S="9.0"))
        await asyncio.sleep(0.4)
        path.mode = Mode.FULL
        held_s = time.monotonic() - path.tries_s[0]
        assert await asked == ["answer"]
        passed_s = time.monotonic() - began_s
        first, second = path.left_s
        assert second <= first <= 9.0 - held_s
        assert 9.0 - passed_s <= second <= 9.0 - (path.tries_s[1] - path.tries_s[0])

    played(monkeypatch, play)


def test_operators_bound_counts_from_the_arrival_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(path: Path, router: DpsRouter) -> None:
        path.ingress._beside.admission = AdmissionOptions(full_wait_s=1.0)
        router.update_replicas([replica("a")])
        began_s = time.monotonic()
        async with path.ingress._queue.place(0):
            asked = asyncio.create_task(path.ask(body_of(dps_precision="full")))
            await asyncio.sleep(0.8)
        with pytest.raises(PrecisionUnavailableError):
            await asked
        # Counted from the end of the queue it would be 1.8 s.
        assert time.monotonic() - began_s == pytest.approx(1.0)

    played(monkeypatch, play)


def test_request_refused_by_a_replica_keeps_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve places it anew then: it must not begin to wait anew."""

    async def play(path: Path, router: DpsRouter) -> None:
        router.update_replicas([replica("a")])
        metadata = RequestMetadata(request_id="r", internal_request_id="r")
        body = body_of(dps_precision="full", dps_wait_s=9.0)
        pending = PendingRequest(args=[body, info_of({})], kwargs={}, metadata=metadata)
        for turn, left_s in enumerate([9.0, 8.7, 8.4]):
            await router._choose_replica_for_request(pending, is_retry=turn > 0)
            assert wait_of(body, None) == pytest.approx(left_s)
            await asyncio.sleep(0.3)

    played(monkeypatch, play)


@pytest.mark.parametrize("value", ["2.5", -1, float("nan"), True, [1.0]])
def test_wait_in_the_body_that_is_no_number_of_seconds_is_refused(value: Any) -> None:
    pending = SimpleNamespace(args=(body_of(dps_wait_s=value), info_of({})))
    with pytest.raises(BadRequestError, match=r"vllm_xargs\.dps_wait_s is .*give seconds"):
        ask_of(pending)
