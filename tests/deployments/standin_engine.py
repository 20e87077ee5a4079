"""Stands for an engine of ``ray.serve.llm`` behind the gate."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from dps_deployments.engine_gate import EngineGate

from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.modes import Mode

TOLD = {"dps_tokens_full": 3, "dps_tokens_fast": 2}


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"vllm_xargs": None, "prompt": "hello", **fields})


def info(**headers: str) -> SimpleNamespace:
    return SimpleNamespace(headers={name.replace("_", "-"): v for name, v in headers.items()})


class Engine:
    """Stands for an engine of ``ray.serve.llm``: passes on what its client generates."""

    def __init__(self, client: "Client") -> None:
        self.client = client
        self.seen: list[Any] = []

    async def completions(self, body: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        self.seen.append(body.vllm_xargs)
        if not body.stream:
            async for _ in self.client.generate():
                pass
            yield SimpleNamespace(usage=SimpleNamespace(completion_tokens=5))
            return
        async for output in self.client.generate():
            reason = '"stop"' if output.finished else "null"
            yield f'data: {{"choices":[{{"text":"a","finish_reason":{reason}}}]}}\n\n'
        yield 'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n'
        yield "data: [DONE]\n\n"

    chat = completions


class Client:
    errored = False

    def __init__(self, told: dict[str, int] | None) -> None:
        self._told = told

    async def generate(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(finished=False, kv_transfer_params=None)
        yield SimpleNamespace(finished=True, kv_transfer_params=self._told)


def gate(
    mode: Mode | None = Mode.FULL,
    told: dict[str, int] | None = None,
    options: AdmissionOptions | None = None,
) -> Engine:
    client = Client(told)
    engine = Engine(client)
    EngineGate(lambda: mode, lambda: options or AdmissionOptions()).guard(engine, client)
    return engine


def collect(engine: Engine, body: Any, headers: Any = None) -> list[Any]:
    async def run() -> list[Any]:
        return [response async for response in engine.completions(body, headers)]

    return asyncio.run(run())
