"""The ingress as Serve makes it of the class, spoken to over ASGI: bounds and their responses."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray.serve.context
from dps_deployments.ingress import DpsIngress
from dps_deployments.limits import RequestLimits
from dps_deployments.refusals import no_replica
from ray.exceptions import RayTaskError
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress

LIMITS = RequestLimits(max_body_bytes=4000).for_context(100)
AS_JSON = {"Content-Type": "application/json"}
GOOD = {"model": "m", "prompt": "x"}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ASGI application; the replicas behind it are played."""

    async def answer(self: Any, **_: Any) -> AsyncIterator[str]:
        yield "data: [DONE]\n\n"

    monkeypatch.setattr(OpenAiIngress, "_get_response", answer)
    cls = make_fastapi_ingress(DpsIngress)
    ingress = cls.__new__(cls)
    made = ingress.__init__(llm_deployments={}, model_cards={}, application="app", limits=LIMITS)
    asyncio.run(made)
    context = SimpleNamespace(servable_object=ingress)
    monkeypatch.setattr(ray.serve.context, "_INTERNAL_REPLICA_CONTEXT", context)
    return ingress


def post(app: Any, route: str = "/v1/completions", **request: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(route, **request)

    return asyncio.run(run())


def test_request_within_bounds_is_served(app: Any) -> None:
    assert post(app, json=GOOD).status_code == 200


async def endless() -> AsyncIterator[bytes]:
    """A chunked body that never ends."""
    while True:
        yield b" " * 1000


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"content": b" " * 5000}, 413, "the body has 5000 bytes: at most 4000"),
        ({"content": endless()}, 413, "the body has more than 4000 bytes"),
        ({"json": {**GOOD, "prompt": "x" * 1601}}, 400, "prompt has 1601 characters"),
        ({"json": {**GOOD, "prompt": [1] * 101}}, 400, "prompt has 101 tokens: at most 100"),
        ({"json": {**GOOD, "priority": 3}}, 400, "scheduling_policy to 'priority'"),
        ({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "is 'text/plain'"),
        ({"data": {"model": "m"}}, 415, "send the body as 'application/json'"),
        ({"data": {"model": "m"}, "files": {"a": b"b"}}, 415, "is 'multipart/form-data; bound"),
        ({"content": b'{"model": "m", "prompt": NaN}', "headers": AS_JSON}, 400, "holds NaN"),
        ({"content": b'{"model": "m", "prompt": 1e999}', "headers": AS_JSON}, 400, "infinite"),
        ({"content": b'{"model": "m", "prompt": "\\ud800"}', "headers": AS_JSON}, 400, "half a"),
        ({"json": GOOD, "headers": {"X-DPS-Wait-S": "long"}}, 400, "X-DPS-Wait-S is 'long'"),
        ({"json": GOOD, "headers": {"X-DPS-Session": "s" * 257}}, 431, "has 257 characters"),
    ],
)
def test_request_beyond_bounds_is_refused_in_the_form_of_the_api(
    app: Any, request_: dict[str, Any], status: int, message: str
) -> None:
    answer = post(app, **request_)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["code"] == status


@pytest.mark.parametrize("content", [b"{", b"[" * 3900, b"\xff\xfe", b"3"])
def test_body_that_is_no_request_is_a_bad_request(app: Any, content: bytes) -> None:
    answer = post(app, content=content, headers=AS_JSON)
    assert answer.status_code == 400
    assert answer.json()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", GOOD),
        ("/v1/embeddings", {"model": "m", "input": "x"}),
        ("/v1/score", {"model": "m", "text_1": "x", "text_2": "y"}),
        ("/tokenize", GOOD),
        ("/detokenize", {"model": "m", "tokens": [1]}),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_every_route_says_when_to_come_back(
    app: Any, route: str, body: dict[str, Any], wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(self: Any, **_: Any) -> AsyncIterator[str]:
        error = no_replica(waited_s=1.0, retry_after_s=7.0)
        raise RayTaskError("f", "", error).as_instanceof_cause() if wrapped else error
        yield ""

    monkeypatch.setattr(OpenAiIngress, "_get_response", lose)
    answer = post(app, route, json=body)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "7")
    message = "no replica could serve within 1.0 s: try again after 7 s"
    assert answer.json() == {"error": {"message": message, "type": "NoReplicaError", "code": 503}}
