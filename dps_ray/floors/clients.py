"""Clients of a fleet, some of whom insist on full precision, and what each of them got."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from dps_ray.checks.requests import EVERY, floor_prompts, insists
from dps_ray.modes import Mode

HEAD_START_S = 0.3
"""Those who insist run for so long before the others of their wave come."""
FAST_WITHIN_S = 3.0
"""Where they come last, they wait so long at most for the others to make replicas go fast."""
FULL_WAIT_S = 1.0
"""How long those who insist let the fleet wait for full mode before it has to refuse, seconds."""
DEADLINE_S = 120.0
"""Every request must have been answered by then, refusals and pauses included, seconds."""
SETTLE_S = 2.5
"""Two heartbeats of a replica, and the age of the controller's status."""
SETTLED_WITHIN_S = 30.0
"""On a machine with much else to do heartbeats come late, but by then they have come."""
TOKENS = ("tokens_full", "tokens_fast")
COUNTERS = (*TOKENS, "switches_to_fast")
REASON_CHARS = 200
POLL_S = 0.1

Counters = dict[str, dict[str, int]]
"""``COUNTERS`` by replica."""


@dataclass(frozen=True, slots=True)
class FloorLoad:
    """How much the clients ask for."""

    requests: int = 2000
    wave: int = 100
    """Requests that are open at once."""
    max_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Refusal:
    """One answer that told a client to come back later."""

    waited_s: float
    retry_after_s: float | None
    """``None``: the fleet did not say when."""


@dataclass(slots=True)
class Answer:
    """One request, from its first sending to its end."""

    insists: bool
    stream: bool
    tokens: list[int] = field(default_factory=list)
    told: dict[str, int] | None = None
    """``usage.dps``: tokens by the mode that made them."""
    refusals: list[Refusal] = field(default_factory=list)
    failure: str = ""
    """Why it was not answered; empty when it was."""
    took_s: float = 0.0

    def told_of(self, name: str) -> int:
        """One of ``TOKENS``; 0 if it was not told."""
        return self.told[name] if self.told is not None else 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all clients got, and what the replicas counted meanwhile."""

    answers: list[Answer]
    """By number of the prompt."""
    replicas: Counters
    """Without what had been counted before."""
    took_s: float

    @property
    def told_as_counted(self) -> bool:
        """What the answers tell of their tokens is what the replicas counted."""
        return all(
            sum(answer.told_of(name) for answer in self.answers)
            == sum(counted[name] for counted in self.replicas.values())
            for name in TOKENS
        )


async def ask_fleet(url: str, model: str, load: FloorLoad, say: Callable[[str], None]) -> Outcome:
    """Send waves of requests and see all of them answered.

    Those who insist come last in odd waves, when the others have made replicas go fast, and first
    in even ones, so that the others press on replicas that may not switch.

    Parameters
    ----------
    url, model
        The fleet, which serves nobody else meanwhile.
    load
        What is sent.
    say
        Gets a line now and then.

    Raises
    ------
    httpx.HTTPError
        The controller does not answer.
    """
    prompts = floor_prompts(load.requests)
    answers = [
        Answer(insists(number), stream=number // EVERY % 2 == 1) for number in range(load.requests)
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=None, trust_env=False
    ) as http:
        before = await _settled_counters(http)
        started_s = time.monotonic()
        for wave, start in enumerate(range(0, load.requests, load.wave)):
            numbers = range(start, min(start + load.wave, load.requests))
            insisting = [number for number in numbers if answers[number].insists]
            others = [number for number in numbers if not answers[number].insists]
            first, then = (insisting, others) if wave % 2 == 0 else (others, insisting)
            async with asyncio.TaskGroup() as group:
                for part in (first, then):
                    for number in part:
                        body = _body(model, prompts[number], load.max_tokens)
                        group.create_task(ask(http, answers[number], body))
                    if part is insisting:
                        await asyncio.sleep(HEAD_START_S)
                    else:
                        await _until_fast(http)
            if wave % 5 == 4:
                say(f"{numbers.stop} of {load.requests} requests ended")
        took_s = time.monotonic() - started_s
        deadline_s = time.monotonic() + SETTLED_WITHIN_S
        while True:
            outcome = Outcome(answers, _since(before, await _counters(http)), took_s)
            if outcome.told_as_counted or time.monotonic() > deadline_s:
                return outcome
            await asyncio.sleep(POLL_S)


def _since(before: Counters, after: Counters) -> Counters:
    return {
        name: {key: value - before.get(name, {}).get(key, 0) for key, value in counted.items()}
        for name, counted in after.items()
    }


def _body(model: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def ask(http: httpx.AsyncClient, answer: Answer, body: dict[str, Any]) -> None:
    """Send a request, and again when told to come back, until it is answered or fails."""
    started_s = time.monotonic()
    headers: dict[str, str] = {}
    if answer.insists:
        headers = {"X-DPS-Precision": "full", "X-DPS-Wait-S": f"{FULL_WAIT_S:g}"}
    if answer.stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (pause_s := await _try(http, answer, body, headers)) is not None:
                await asyncio.sleep(pause_s)
    except TimeoutError:
        answer.failure = f"hung: not ended after {DEADLINE_S:g} s"
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        # An answer that is no JSON, or not an API's, is a failure like any other.
        answer.failure = f"{type(error).__name__}: {error}"[:REASON_CHARS]
    answer.took_s = time.monotonic() - started_s


async def _try(
    http: httpx.AsyncClient, answer: Answer, body: dict[str, Any], headers: dict[str, str]
) -> float | None:
    """Send a request once; the pause before the next time, or ``None`` when it has ended."""
    started_s = time.monotonic()
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE and answer.insists:
            told = response.headers.get("Retry-After")
            pause_s = None if told is None else float(told)
            answer.refusals.append(Refusal(time.monotonic() - started_s, pause_s))
            return 1.0 if pause_s is None else pause_s
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            answer.failure = f"HTTP {response.status_code}: {text}"[:REASON_CHARS]
            return None
        if not answer.stream:
            _take(answer, json.loads(await response.aread()))
            return None
        async for data in _events(response):
            if data == "[DONE]":
                return None
            event = json.loads(data)
            if "error" in event:
                answer.failure = data[:REASON_CHARS]
                return None
            _take(answer, event)
    answer.failure = "the stream ended without [DONE]"
    return None


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def _take(answer: Answer, part: dict[str, Any]) -> None:
    """Add an answer, or one event of it."""
    for choice in part["choices"]:
        answer.tokens += choice.get("token_ids") or ()
    answer.told = (part.get("usage") or {}).get("dps", answer.told)


async def _until_fast(http: httpx.AsyncClient) -> None:
    deadline_s = time.monotonic() + FAST_WITHIN_S
    while time.monotonic() < deadline_s:
        # A status that comes late must not end the requests that are open.
        with suppress(httpx.HTTPError):
            modes = [state["mode"] for state in (await _states(http)).values()]
            if modes and all(mode == Mode.FAST for mode in modes):
                return
        await asyncio.sleep(POLL_S)


async def _settled_counters(http: httpx.AsyncClient) -> Counters:
    """What each replica has counted, once nobody has told anything new for ``SETTLE_S``."""
    deadline_s = time.monotonic() + SETTLED_WITHIN_S
    counted = await _counters(http)
    while True:
        await asyncio.sleep(SETTLE_S)
        earlier, counted = counted, await _counters(http)
        if counted == earlier or time.monotonic() > deadline_s:
            return counted


async def _counters(http: httpx.AsyncClient) -> Counters:
    """What each replica has counted, as it last told the controller."""
    states = await _states(http)
    return {
        replica_id: {name: state[name] or 0 for name in COUNTERS}
        for replica_id, state in states.items()
    }


async def _states(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """Latest reports of the fleet's live replicas."""
    status = (await http.get("/dps/status", timeout=10.0)).raise_for_status().json()
    return {
        entry["replica_id"]: entry["state"]
        for entry in status["replicas"]
        if entry["standing"] == "live"
    }
