"""What one request may bring: bodies, headers and prompts, each refused with field and limit."""

import asyncio
import json
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
from dps_deployments.edge import Edge
from dps_deployments.limits import RequestLimits
from dps_deployments.refusals import BadRequestError
from ray.serve.llm.openai_api_models import ChatCompletionRequest

LIMITS = RequestLimits(max_body_bytes=100, max_headers=5, max_header_bytes=400, max_value_chars=20)


class Server:
    """An application behind the edge, and a client that sends a body in pieces."""

    def __init__(self, *pieces: bytes, headers: dict[str, str] | None = None) -> None:
        self.pieces = list(pieces)
        given = {"content-type": "application/json", **(headers or {})}
        self.headers = [(k.encode(), v.encode()) for k, v in given.items()]
        self.seen: list[bytes] = []
        self.sent: list[MutableMapping[str, Any]] = []
        self.read = 0

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        self.seen.append(message["body"])

    async def receive(self) -> dict[str, Any]:
        self.read += 1
        if not self.pieces:
            return {"type": "http.disconnect"}
        piece = self.pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    def run(self, limits: RequestLimits = LIMITS) -> "Server":
        scope = {"type": "http", "path": "/v1/completions", "headers": self.headers}
        asyncio.run(Edge(self.app, limits)(scope, self.receive, self.send))
        return self

    @property
    def refusal(self) -> tuple[int, str]:
        assert self.seen == []
        message = json.loads(self.sent[1]["body"])["error"]["message"]
        return self.sent[0]["status"], message


def test_body_within_bounds_arrives_whole() -> None:
    assert Server(b"a" * 60, b"b" * 40).run().seen == [b"a" * 60 + b"b" * 40]


def test_told_length_beyond_the_limit_is_refused_before_the_body_is_read() -> None:
    server = Server(b"x" * 5000, headers={"content-length": "5000"}).run()
    assert server.refusal == (
        413,
        "the body has 5000 bytes: at most 100 (limits.max_body_bytes)",
    )
    assert server.read == 0


@pytest.mark.parametrize("headers", [{}, {"content-length": "7"}])
def test_body_of_untold_or_wrong_length_is_refused_as_soon_as_it_is_too_long(
    headers: dict[str, str],
) -> None:
    server = Server(*[b"x" * 30] * 100, headers=headers).run()
    assert server.refusal == (
        413,
        "the body has more than 100 bytes: at most 100 (limits.max_body_bytes)",
    )
    assert server.read == 4


def test_body_that_does_not_arrive_is_given_up() -> None:
    class Slow(Server):
        async def receive(self) -> dict[str, Any]:
            await asyncio.sleep(60.0)
            return {}

    server = Slow().run(LIMITS.model_copy(update={"max_body_s": 0.02}))
    assert server.refusal[0] == 408


def test_client_that_leaves_in_the_middle_of_its_body_is_no_request() -> None:
    class Leaving(Server):
        async def receive(self) -> dict[str, Any]:
            return {"type": "http.disconnect"}

    server = Leaving().run()
    assert (server.seen, server.sent) == ([], [])


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({f"h{n}": "" for n in range(5)}, 431, "the request has 6 headers: at most 5"),
        ({"cookie": "x" * 500}, 431, "the headers have 534 bytes: at most 400"),
        (
            {"X-DPS-Precision": "f" * 30},
            431,
            "header X-DPS-Precision has 30 characters: at most 20 (limits.max_value_chars)",
        ),
        (
            {"X-DPS-Precision": "full", "x-dps-precision": "any"},
            400,
            "header x-dps-precision is given twice",
        ),
        ({"X-Request-Disconnect-Disabled": "?1"}, 400, "Disabled is not for clients"),
        ({"X-Request-Timeout-Seconds": "-1"}, 400, "Timeout-Seconds is not for clients"),
        ({"Content-Type": "text/plain"}, 400, "header Content-Type is given twice"),
    ],
)
def test_headers_are_bounded(headers: dict[str, str], status: int, message: str) -> None:
    found = Server(b"{}", headers=headers).run().refusal
    assert found[0] == status
    assert message in found[1]


def body(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


PROMPTS = RequestLimits(max_prompts=3, max_choices=6).for_context(10)
LONG = "x" * 161


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "given",
    [
        body(prompt="x" * 160),
        body(prompt=[1] * 10),
        body(prompt=["a", "b", "c"], n=2),
        body(prompt=[[1] * 10] * 3),
        body(messages=[{"content": "x" * 69}, {"content": [{"type": "text", "text": "y" * 65}]}]),
        body(messages=[{"content": [{"image_url": {"url": "x" * 500}}]}]),
        body(messages=[{"role": "assistant", "content": None}]),
        body(prompt=[]),
        body(),
    ],
)
def test_prompts_within_bounds_pass(given: SimpleNamespace) -> None:
    PROMPTS.check_prompts(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (body(prompt="x" * 161), "prompt has 161 characters: at most 160"),
        (body(prompt=[1] * 11), "prompt has 11 tokens: at most 10 (limits.max_prompt_tokens)"),
        (body(prompt=["a", "x" * 161]), "prompt.1 has 161 characters"),
        (body(prompt=[[1], [1] * 11]), "prompt.1 has 11 tokens"),
        (body(prompt=["a"] * 4), "prompt holds 4 prompts: at most 3 (limits.max_prompts)"),
        (body(prompt=["a"] * 3, n=3), "n asks for 9 answers (3 prompts): at most 6"),
        (
            body(messages=[{"content": "x" * 100}] * 2),
            "messages with tools has 214 characters: at most 160",
        ),
        (body(input=["a"] * 4), "input holds 4 prompts"),
        (body(tokens=[1] * 11), "tokens has 11 tokens"),
    ],
)
def test_prompts_beyond_bounds_are_refused(given: SimpleNamespace, message: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        PROMPTS.check_prompts(given)
    assert message in str(raised.value)
    assert raised.value.status_code == 400


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [{"role": "custom", "content": [LONG]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": LONG}]}]},
        {"messages": [{"role": "assistant", "reasoning": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [call(LONG)]}]},
        {"messages": [{"role": "assistant", "content": [], "tool_calls": [call(LONG)] * 2}]},
        {"messages": [], "tools": [{"type": "function", "function": {"name": LONG}}]},
        {"messages": [], "documents": [{"text": LONG}]},
    ],
)
def test_every_text_a_chat_prompt_is_made_of_counts(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="messages with tools has"):
        PROMPTS.check_prompts(ChatCompletionRequest.model_validate({"model": "m", **given}))


def once(*parts: Any) -> ChatCompletionRequest:
    """A chat whose content pydantic leaves to be iterated once: its assistant has both of these."""
    both = {"audio": {"id": "a"}, "function_call": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": list(parts), **both}
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [message]})


def test_content_that_can_be_read_once_is_counted_and_still_there() -> None:
    part = {"type": "text", "text": "hello"}
    asked = once(part)
    PROMPTS.check_prompts(asked)
    assert list(asked.messages[0]["content"]) == [part]  # type: ignore[typeddict-item]
    with pytest.raises(BadRequestError, match="messages with tools has"):
        PROMPTS.check_prompts(once({"type": "text", "text": LONG}))
    with pytest.raises(BadRequestError, match=r"messages\.0\.content is wrong"):
        PROMPTS.check_prompts(once({"type": "text", "text": 3}))


def test_own_bounds_beat_those_of_the_context() -> None:
    limits = RequestLimits(max_prompt_chars=7).for_context(10)
    assert (limits.max_prompt_tokens, limits.max_prompt_chars) == (10, 7)
    assert RequestLimits().for_context(None).max_prompt_chars is None
