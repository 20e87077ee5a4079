"""Retries, refusals and the queue's bound, on the ingress class without a cluster."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from dps_deployments.ingress import ATTEMPTS, LOST_EVENTS, DpsIngress
from dps_deployments.refusals import (
    BadRequestError,
    OverloadedError,
    ReplicaLostError,
    replica_lost,
)
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError
from ray.serve.llm.ingress import OpenAiIngress


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


def ask(body: Any = None, priorities: bool = False) -> list[Any]:
    async def run() -> list[Any]:
        ingress = DpsIngress({}, {}, application="test", priorities=priorities)
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
