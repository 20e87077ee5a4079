"""Clients that insist on full precision, against a server that answers what it is told to."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from dps_ray.floors.clients import Answer, ask

WHOLE = {
    "choices": [{"token_ids": [7, 8]}],
    "usage": {"completion_tokens": 2, "dps": {"tokens_full": 2, "tokens_fast": 0}},
}


def asked(answer: Answer, *replies: httpx.Response) -> list[httpx.Request]:
    """Let ``answer`` be asked for; the server replies in turn. What it was sent."""
    left = list(replies)
    requests: list[httpx.Request] = []

    def reply(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return left.pop(0)

    async def run(handler: Callable[[httpx.Request], httpx.Response]) -> None:
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as http:
            await ask(http, answer, {"prompt": [1]})

    asyncio.run(run(reply))
    return requests


def events(*parts: object) -> httpx.Response:
    return httpx.Response(200, text="".join(f"data: {part}\n\n" for part in parts))


def test_refused_client_comes_back_when_told_and_takes_the_answer() -> None:
    answer = Answer(insists=True, stream=False)
    refusal = httpx.Response(503, headers={"Retry-After": "0"})
    requests = asked(answer, refusal, httpx.Response(200, json=WHOLE))
    assert [request.headers["X-DPS-Precision"] for request in requests] == ["full", "full"]
    assert [each.retry_after_s for each in answer.refusals] == [0.0]
    assert (answer.tokens, answer.told, answer.failure) == ([7, 8], WHOLE["usage"]["dps"], "")


def test_client_that_does_not_insist_is_lost_when_it_is_refused() -> None:
    answer = Answer(insists=False, stream=False)
    (request,) = asked(answer, httpx.Response(503, headers={"Retry-After": "0"}))
    assert "X-DPS-Precision" not in request.headers
    assert answer.failure.startswith("HTTP 503")


def test_tokens_of_a_stream_are_put_together_and_its_usage_is_kept() -> None:
    answer = Answer(insists=False, stream=True)
    told = {"tokens_full": 1, "tokens_fast": 1}
    asked(
        answer,
        events(
            json.dumps({"choices": [{"token_ids": [7]}]}),
            json.dumps({"choices": [{"token_ids": [8]}]}),
            json.dumps({"choices": [], "usage": {"dps": told}}),
            "[DONE]",
        ),
    )
    assert (answer.tokens, answer.told, answer.failure) == ([7, 8], told, "")


def test_stream_that_breaks_off_or_ends_with_an_error_is_a_failure() -> None:
    broken = Answer(insists=False, stream=True)
    asked(broken, events(json.dumps({"choices": [{"token_ids": [7]}]})))
    assert broken.failure == "the stream ended without [DONE]"
    refused = Answer(insists=False, stream=True)
    asked(refused, events(json.dumps({"error": {"message": "the replica died"}}), "[DONE]"))
    assert "the replica died" in refused.failure


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (httpx.Response(200, text="<html>"), "JSONDecodeError"),
        (httpx.Response(200, json={"object": "error"}), "choices"),
        (httpx.Response(200, json=["choices"]), "TypeError"),
        (httpx.Response(503, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), "2026"),
    ],
)
def test_answer_that_is_not_the_apis_is_a_failure(reply: httpx.Response, word: str) -> None:
    answer = Answer(insists=True, stream=False)
    asked(answer, reply)
    assert word in answer.failure
