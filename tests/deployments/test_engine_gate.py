"""A precision floor on its way through a replica, and what the response tells about the tokens."""

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from dps_deployments.engine_gate import POLL_PERIOD_S, EngineGate
from dps_deployments.origins import observed, tell_origins
from dps_deployments.refusals import (
    BadRequestError,
    PrecisionUnavailableError,
    ReplicaLostError,
)
from dps_deployments.requests import ask_of, floor_of, priority_of

from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.modes import Floor, Mode


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"vllm_xargs": None, "prompt": "hello", **fields})


def info(**headers: str) -> SimpleNamespace:
    return SimpleNamespace(headers={name.replace("_", "-"): v for name, v in headers.items()})


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (request(), {}, Floor.ANY),
        (request(), {"X-DPS-Precision": "full"}, Floor.FULL),
        (request(vllm_xargs={"dps_precision": "prefer-full"}), None, Floor.PREFER_FULL),
        (request(vllm_xargs={"dps_precision": "any"}), {"x-dps-precision": "full"}, Floor.FULL),
    ],
)
def test_floor_is_read_from_the_header_then_the_body(
    body: Any, headers: dict[str, str] | None, expected: Floor
) -> None:
    assert floor_of(body, headers) is expected


def test_unknown_floor_is_refused_with_the_choices() -> None:
    with pytest.raises(BadRequestError, match="'half': give one of any, prefer-full, full"):
        floor_of(request(), {"X-DPS-Precision": "half"})


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_wait_that_is_no_number_of_seconds_is_refused(value: str) -> None:
    pending = SimpleNamespace(args=(request(), info(X_DPS_Wait_S=value)))
    with pytest.raises(BadRequestError, match="X-DPS-Wait-S"):
        ask_of(pending)


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (request(), {}, 0),
        (request(priority=3), {}, 3),
        (request(priority=3), {"x-vllm-priority": "-2"}, -2),
    ],
)
def test_priority_is_read_from_the_header_then_the_body(
    body: Any, headers: dict[str, str], expected: int
) -> None:
    assert priority_of(body, headers) == expected


@pytest.mark.parametrize("value", ["soon", "1.5", str(2**63)])
def test_priority_that_vllm_would_ignore_is_refused(value: str) -> None:
    with pytest.raises(BadRequestError, match="X-Vllm-Priority is"):
        priority_of(request(), {"X-Vllm-Priority": value})


def test_chat_prompts_with_the_same_beginning_share_their_prefix() -> None:
    def ask(question: str) -> tuple[int, ...]:
        messages = [{"role": "system", "content": "Be kind. " * 100}, {"content": question}]
        return ask_of(SimpleNamespace(args=(SimpleNamespace(messages=messages),))).prefix

    one, other = ask("first?" * 100), ask("second?" * 100)
    assert one[:3] == other[:3]
    assert one != other


def test_refusals_survive_the_way_between_processes() -> None:
    error = PrecisionUnavailableError("no", 503, 4.0)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.status_code, again.retry_after_s) == ("no", 503, 4.0)


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


class DyingClient(Client):
    """An engine that dies after some outputs."""

    def __init__(self, outputs: int) -> None:
        super().__init__(None)
        self._outputs = outputs

    async def generate(self) -> AsyncIterator[Any]:
        for _ in range(self._outputs):
            yield SimpleNamespace(finished=False, kv_transfer_params=None)
        self.errored = True
        raise RuntimeError("EngineDead")


def dying(outputs: int) -> Engine:
    client = DyingClient(outputs)
    engine = Engine(client)
    EngineGate(lambda: Mode.FULL, AdmissionOptions).guard(engine, client)
    return engine


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_a_dying_engine_has_not_answered_can_go_elsewhere(stream: bool) -> None:
    with pytest.raises(ReplicaLostError):
        collect(dying(0), request(stream=stream))


class Telling(Engine):
    """Tells its death in the stream, as vLLM does, by an event that points to a stack trace."""

    async def completions(self, body: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield 'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
        self.client.errored = True
        yield 'data: {"error":{"message":"See stack trace (above)"}}\n\n'


def test_stream_that_has_begun_ends_with_the_loss_of_the_replica_not_with_internals() -> None:
    telling = Telling(Client(None))
    EngineGate(lambda: Mode.FULL, AdmissionOptions).guard(telling, telling.client)
    for engine in (dying(1), telling):
        with pytest.raises(ReplicaLostError):
            collect(engine, request(stream=True))


def test_error_of_a_living_engine_is_passed_on() -> None:
    class Refusing(Engine):
        async def completions(self, body: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
            raise ValueError("prompt too long")
            yield

    client = Client(None)
    engine = Refusing(client)
    EngineGate(lambda: Mode.FULL, AdmissionOptions).guard(engine, client)
    with pytest.raises(ValueError, match="prompt too long"):
        collect(engine, request(stream=False))


TOLD = {"dps_tokens_full": 3, "dps_tokens_fast": 2}


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


def test_floor_of_the_header_reaches_the_engine_with_the_other_arguments() -> None:
    engine = gate()
    body = request(stream=False, vllm_xargs={"other": 1})
    collect(engine, body, info(X_DPS_Precision="full"))
    collect(engine, request(stream=False))
    told, untold = engine.seen
    assert 0.0 < told.pop("dps_wait_s") <= AdmissionOptions().full_wait_s
    assert told == {"other": 1, "dps_precision": "full"}
    assert untold is None


def test_floor_of_the_header_wins_over_the_body_in_the_engine_too() -> None:
    engine = gate()
    body = request(stream=False, vllm_xargs={"dps_precision": "full"})
    collect(engine, body, info(X_DPS_Precision="any"))
    assert engine.seen == [{"dps_precision": "any"}]


def test_request_that_insists_is_refused_in_its_time_while_the_replica_is_fast() -> None:
    engine = gate(mode=Mode.FAST)
    headers = info(X_DPS_Precision="full", X_DPS_Wait_S="0.05")
    with pytest.raises(PrecisionUnavailableError) as raised:
        collect(engine, request(stream=False), headers)
    assert raised.value.retry_after_s == 2.0
    assert engine.seen == []


def test_client_cannot_ask_for_a_longer_wait_than_the_operator_allows() -> None:
    engine = gate(mode=Mode.FAST, options=AdmissionOptions(full_wait_s=0.0))
    with pytest.raises(PrecisionUnavailableError):
        collect(engine, request(stream=False), info(X_DPS_Precision="full", X_DPS_Wait_S="60"))


def test_waiting_requests_share_one_look_and_each_keeps_its_own_patience() -> None:
    mode, looks = Mode.FAST, 0

    def read_mode() -> Mode:
        nonlocal looks
        looks += 1
        return mode

    client = Client(None)
    engine = Engine(client)
    EngineGate(read_mode, AdmissionOptions).guard(engine, client)

    async def ask(wait_s: float) -> bool:
        headers = info(X_DPS_Precision="full", X_DPS_Wait_S=str(wait_s))
        try:
            async for _ in engine.completions(request(stream=False), headers):
                pass
        except PrecisionUnavailableError:
            return False
        return True

    async def run() -> list[bool]:
        nonlocal mode
        impatient = await asyncio.gather(*(ask(0.1) for _ in range(50)))
        # The look of those before ends while this one begins to wait.
        patient = [asyncio.create_task(ask(10.0)) for _ in range(50)]
        await asyncio.sleep(0.2)
        mode = Mode.FULL
        return [*impatient, *await asyncio.gather(*patient)]

    assert asyncio.run(run()) == [False] * 50 + [True] * 50
    assert looks <= 100 + 0.3 / POLL_PERIOD_S + 10


def test_engine_is_told_how_much_of_the_wait_is_left() -> None:
    """It may go fast between the gate's look at it and its own look at the request."""
    engine = gate()
    collect(engine, request(stream=False), info(X_DPS_Precision="full", X_DPS_Wait_S="0.5"))
    (seen,) = engine.seen
    assert 0.0 < seen["dps_wait_s"] <= 0.5


class Serving(Engine):
    """As vLLM's server: it makes an event of an error that ends a stream."""

    async def completions(self, body: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        try:
            async for response in super().completions(body, raw_request_info):
                yield response
        except Exception as error:
            if not body.stream:
                raise
            yield f'data: {{"error":{{"message":"{type(error).__name__}"}}}}\n\n'


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_the_engine_let_wait_in_vain_gets_the_gates_own_refusal(stream: bool) -> None:
    class Late(Client):
        async def generate(self) -> AsyncIterator[Any]:
            yield SimpleNamespace(finished=True, kv_transfer_params=self._told)

    client = Late({"dps_tokens_full": 0, "dps_tokens_fast": 0, "dps_gave_up_after_s": 2.5})
    engine = Serving(client)
    EngineGate(lambda: Mode.FULL, AdmissionOptions).guard(engine, client)
    with pytest.raises(PrecisionUnavailableError, match=r"within 2\.5 s") as raised:
        collect(engine, request(stream=stream), info(X_DPS_Precision="full"))
    assert raised.value.retry_after_s == 2.0


def test_what_the_engine_refuses_at_once_comes_before_any_output_is_asked_for() -> None:
    class Strict(Client):
        def generate(self) -> AsyncIterator[Any]:  # type: ignore[override]
            raise ValueError("too long")

    client = Strict(None)
    observed_generate = observed(client.generate)
    with pytest.raises(ValueError, match="too long"):
        observed_generate()


def test_beam_search_cannot_insist_on_full_precision() -> None:
    body = request(stream=False, use_beam_search=True)
    with pytest.raises(BadRequestError, match="use_beam_search"):
        collect(gate(), body, info(X_DPS_Precision="full"))
    collect(gate(), request(stream=False, use_beam_search=True))


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
