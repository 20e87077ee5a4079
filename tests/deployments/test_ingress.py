"""Retries, refusals and the queue's bound, on the ingress class without a cluster."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from dps_deployments.beside import Beside
from dps_deployments.ingress import ATTEMPTS, LOST_EVENTS, DpsIngress
from dps_deployments.limits import RequestLimits
from dps_deployments.refusals import (
    BadRequestError,
    OverloadedError,
    ReplicaLostError,
    replica_lost,
)
from ray.exceptions import ActorDiedError
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionResponse
from ray.serve.exceptions import BackPressureError
from ray.serve.llm.ingress import OpenAiIngress
from starlette.responses import StreamingResponse
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from dps_ray.config import DpsConfigError


class Calls:
    """Plays the replicas: each call follows the next script of responses and errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *scripts: list[Any]) -> None:
        self._scripts = list(scripts)
        self.count = 0
        monkeypatch.setattr(OpenAiIngress, "_get_response", self._respond)
        monkeypatch.setattr("dps_deployments.ingress.RETRY_PAUSE_S", 0.0)

    async def _respond(self, **_: Any) -> AsyncIterator[Any]:
        script = self._scripts[min(self.count, len(self._scripts) - 1)]
        self.count += 1
        for item in script:
            if isinstance(item, Exception):
                raise item
            yield item


def make(**arguments: Any) -> DpsIngress:
    return DpsIngress({}, {}, application="test", **arguments)


def ask(body: Any = None, priorities: bool = False) -> list[Any]:
    async def run() -> list[Any]:
        ingress = make(priorities=priorities)
        return [r async for r in ingress._get_response(body=body, call_method="chat")]

    return asyncio.run(run())


@pytest.mark.parametrize("death", [ActorDiedError(), replica_lost("the engine has ended")])
def test_request_whose_replica_died_before_answering_goes_to_another(
    monkeypatch: pytest.MonkeyPatch, death: Exception
) -> None:
    calls = Calls(monkeypatch, [death], ["answer"])
    assert ask() == ["answer"]
    assert calls.count == 2


def test_request_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, [ActorDiedError()])
    with pytest.raises(ReplicaLostError) as raised:
        ask()
    assert calls.count == ATTEMPTS
    assert raised.value.status_code == 503
    assert raised.value.retry_after_s is not None


def test_no_request_claims_to_be_more_urgent_than_the_operator_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Calls(monkeypatch, ["answer"])
    limits = RequestLimits(min_priority=-3)

    async def run(priority: int) -> Any:
        ingress = make(priorities=True, limits=limits)
        body = SimpleNamespace(priority=priority)
        return await anext(ingress._get_response(body=body, call_method="chat"))

    assert asyncio.run(run(-3)) == "answer"
    with pytest.raises(BadRequestError, match=r"priority is -4: at least -3 \(limits"):
        asyncio.run(run(-4))


@pytest.mark.parametrize("deployed", [2, None])
def test_ingress_that_was_scaled_past_its_arguments_refuses_to_start(
    monkeypatch: pytest.MonkeyPatch, deployed: int | None
) -> None:
    """By options under ``deployments``, which no builder sees."""
    context = SimpleNamespace(app_name="test")
    monkeypatch.setattr("dps_deployments.ingress.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("dps_deployments.ingress.deployed_replicas", lambda: deployed)
    with pytest.raises(DpsConfigError, match=r"args\.ingress\.num_replicas is 1: .* set it there"):
        DpsIngress({}, {}, ingress_replicas=1)
    if deployed is not None:
        DpsIngress({}, {}, ingress_replicas=deployed)


def test_stream_that_has_begun_ends_with_an_error_event_and_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(monkeypatch, [["data: 1\n\n"], ActorDiedError()])
    assert ask() == [["data: 1\n\n"], LOST_EVENTS]
    assert calls.count == 1


def test_full_queue_is_refused_with_a_time_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    full = BackPressureError(num_queued_requests=9, max_queued_requests=9)
    calls = Calls(monkeypatch, [full])
    with pytest.raises(OverloadedError) as raised:
        ask()
    assert raised.value.retry_after_s == 2.0
    assert calls.count == 1


@pytest.mark.parametrize("stream", [False, True])
def test_answers_make_the_rate_that_refusals_tell_from(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """By Ray's own handler, which drops what answers as soon as it has one that is no stream."""
    whole = CompletionResponse(model="m", choices=[], usage=UsageInfo())
    Calls(monkeypatch, ["data: 1\n\n"] if stream else [whole])

    async def run() -> None:
        ingress = make()
        assert refused(ingress) == 2.0
        response = await ingress._process_llm_request(SimpleNamespace(stream=stream), "completions")
        if isinstance(response, StreamingResponse):
            assert refused(ingress) == 2.0
            assert [piece async for piece in response.body_iterator][-1] == "data: [DONE]\n\n"
        assert refused(ingress) >= 31.0

    def refused(ingress: DpsIngress) -> float:
        error = ingress._queue.refusal(before=30)
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s is not None
        return error.retry_after_s

    asyncio.run(run())


@pytest.mark.parametrize(("serves_full", "passes"), [(False, True), (True, False)])
def test_request_that_insists_on_full_precision_passes_the_queue_only_while_no_replica_has_it(
    monkeypatch: pytest.MonkeyPatch, serves_full: bool, passes: bool
) -> None:
    calls = Calls(monkeypatch, ["answer"])

    async def run() -> None:
        ingress = make()
        ingress._beside = Beside(places=1, serves_full=serves_full)
        async with ingress._queue.place(0):
            body = SimpleNamespace(vllm_xargs={"dps_precision": "full"})
            asked = ingress._get_response(body=body, call_method="chat")
            waiting = asyncio.create_task(anext(asked))
            for _ in range(20):
                await asyncio.sleep(0)
            assert calls.count == int(passes)
        assert await waiting == "answer"
        await asked.aclose()

    asyncio.run(run())


def test_error_of_the_request_itself_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, [ValueError("prompt too long")])
    with pytest.raises(ValueError, match="prompt too long"):
        ask()
    assert calls.count == 1


def test_priority_is_refused_where_the_engines_do_not_schedule_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(monkeypatch, ["answer"])
    assert ask(SimpleNamespace(priority=0)) == ["answer"]
    assert ask(SimpleNamespace(priority=-5), priorities=True) == ["answer"]
    with pytest.raises(BadRequestError, match=r"priority is -5: .*scheduling_policy to 'priority'"):
        ask(SimpleNamespace(priority=-5))
    assert calls.count == 2
