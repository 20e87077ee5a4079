"""What a response tells about the modes that made its tokens."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dps_deployments.origins import observed, tell_origins

from .standin_engine import TOLD, Client, Engine, collect, gate, request


def test_usage_tells_the_origins_of_the_tokens() -> None:
    (response,) = collect(gate(told=TOLD), request(stream=False))
    assert response.usage.dps == {"tokens_full": 3, "tokens_fast": 2}


def test_last_chunk_and_usage_of_a_stream_tell_the_origins_and_others_pass_unchanged() -> None:
    first, last, usage, done = collect(gate(told=TOLD), request(stream=True))
    assert first == 'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    assert json.loads(last.removeprefix("data: "))["dps"] == {"tokens_full": 3, "tokens_fast": 2}
    parsed = json.loads(usage.removeprefix("data: "))
    assert parsed["usage"] == {
        "completion_tokens": 5,
        "dps": {"tokens_full": 3, "tokens_fast": 2},
    }
    assert done == "data: [DONE]\n\n"


def test_engine_that_is_not_elastic_adds_nothing() -> None:
    assert '"dps"' not in "".join(collect(gate(), request(stream=True)))


def test_what_the_engine_refuses_at_once_comes_before_any_output_is_asked_for() -> None:
    class Strict(Client):
        def generate(self) -> AsyncIterator[Any]:  # type: ignore[override]
            raise ValueError("too long")

    client = Strict(None)
    observed_generate = observed(client.generate)
    with pytest.raises(ValueError, match="too long"):
        observed_generate()


def test_requests_that_overlap_keep_their_origins_apart() -> None:
    class Slow(Client):
        async def generate(self) -> AsyncIterator[Any]:
            async for output in super().generate():
                await asyncio.sleep(0.01)
                yield output

    async def one(told: dict[str, int]) -> dict[str, int]:
        client = Slow(told)
        client.generate = observed(client.generate)  # type: ignore[method-assign]
        engine = Engine(client)
        responses = tell_origins(engine.completions(request(stream=False)))
        (response,) = [response async for response in responses]
        return dict(response.usage.dps)

    async def both() -> list[dict[str, int]]:
        other = {"dps_tokens_full": 0, "dps_tokens_fast": 9}
        return await asyncio.gather(one(TOLD), one(other))

    assert asyncio.run(both()) == [
        {"tokens_full": 3, "tokens_fast": 2},
        {"tokens_full": 0, "tokens_fast": 9},
    ]
