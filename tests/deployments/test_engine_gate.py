"""A request on its way through a replica: precision floor, rank, and the engine's death."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from dps_deployments.engine_gate import MAX_PRIORITY, POLL_PERIOD_S, EngineGate
from dps_deployments.refusals import (
    BadRequestError,
    PrecisionUnavailableError,
    ReplicaLostError,
)

from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.modes import Mode

from .. import played_time
from .standin_engine import Client, Engine, collect, gate, info, request


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


def test_waiting_requests_share_one_look_and_each_keeps_its_own_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

    assert played_time.run(monkeypatch, run()) == [False] * 50 + [True] * 50
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


def test_engine_serves_by_the_rank_of_a_request_not_by_its_bare_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = AdmissionOptions(priority_ageing_s=0.05)
    told: list[int] = []

    class Ranked(Engine):
        async def completions(self, body: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
            told.append(body.priority)
            # Where a header is left, vLLM reads that.
            assert raw_request_info is None or dict(raw_request_info.headers) == {"x": "kept"}
            yield SimpleNamespace(usage=None)

    client = Client(None)
    engine = Ranked(client)
    EngineGate(lambda: Mode.FULL, lambda: options, priorities=True).guard(engine, client)

    async def ask(priority: int, headers: Any = None) -> None:
        async for _ in engine.completions(request(stream=False, priority=priority), headers):
            pass

    async def play() -> None:
        await ask(7, info(X_Vllm_Priority="2", x="kept"))
        await ask(1)
        await asyncio.sleep(0.2)
        await ask(1)
        await ask(-(2**63))

    played_time.run(monkeypatch, play())
    lazy, urgent, late, first = told
    assert first == -MAX_PRIORITY < urgent < lazy < late


def test_beam_search_cannot_insist_on_full_precision() -> None:
    body = request(stream=False, use_beam_search=True)
    with pytest.raises(BadRequestError, match="use_beam_search"):
        collect(gate(), body, info(X_DPS_Precision="full"))
    collect(gate(), request(stream=False, use_beam_search=True))
