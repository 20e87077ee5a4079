"""The first tokens of an engine are made before anybody asks for some."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from dps_ray.engine.warm_up import warm_up


class Client:
    """Plays ``AsyncLLM``, with its own check of what the model can do."""

    def __init__(self, *tasks: str) -> None:
        self._tasks: Any = tasks
        self.asked: list[SamplingParams] = []

    async def get_supported_tasks(self) -> Any:
        return self._tasks

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str
    ) -> AsyncIterator[None]:
        if self._tasks != ("generate",):
            InputProcessor._validate_params(None, params, self._tasks)  # type: ignore[arg-type]
        self.asked.append(params)
        yield None


def test_engine_makes_a_prefill_and_a_decode() -> None:
    client = Client("generate")
    asyncio.run(warm_up(client))
    (params,) = client.asked
    assert params.max_tokens == 2
    assert params.ignore_eos


@pytest.mark.parametrize("tasks", [("embed", "token_embed"), ("classify",), ("transcription",)])
def test_engine_that_does_not_generate_starts_without(tasks: tuple[str, ...]) -> None:
    client = Client(*tasks)
    asyncio.run(warm_up(client))
    assert client.asked == []
