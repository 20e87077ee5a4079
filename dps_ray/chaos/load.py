"""The clients: waves of streaming and other requests, and how each of them ended."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import httpx

RESEND_PAUSE_S = 0.2
CALM_CLIENTS = 1
"""Clients that go on between two waves."""
REASON_CHARS = 200


class Ending(StrEnum):
    """How a request ended for its client."""

    OK = "ok"
    """Answered in full: with all tokens asked for, none twice."""
    WRONG = "wrong"
    """Ended as if answered in full, but with other tokens than asked for."""
    LOST = "lost"
    """An error although no token had been given: another replica should have taken it."""
    ERROR = "error"
    """A clear error after some tokens, which cannot be taken back."""
    CUT = "cut"
    """The connection broke after some tokens, without a word."""
    HUNG = "hung"
    """Not ended by its deadline."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the clients send."""

    clients: int = 6
    """Requests open at once in a wave."""
    wave_s: float = 8.0
    calm_s: float = 4.0
    """Time between two waves, in which lent memory can return, seconds."""
    deadline_s: float = 60.0
    """Every request must have ended by then, seconds after it was first sent."""
    prompt_tokens: tuple[int, int] = (40, 90)
    """Fewest and most."""
    output_tokens: tuple[int, int] = (8, 24)
    vocabulary: int = 500
    stream_share: float = 0.5
    seed: int = 0


@dataclass(slots=True)
class Record:
    """One request, from its first sending to its end."""

    stream: bool
    wanted_tokens: int
    started_s: float
    ended_s: float = 0.0
    tokens: int = 0
    """Of a stream: events with text; of another request: what its usage says."""
    ending: Ending = Ending.HUNG
    resent: int = 0
    """Times the client sent it again because its connection had broken before any byte."""
    reason: str = ""


class _BrokenError(Exception):
    """The connection broke before a byte of the answer had come."""


class Load:
    """Clients that send one request after the other until told to stop.

    Parameters
    ----------
    url, model
        The fleet.
    options
        What they send.
    """

    def __init__(self, url: str, model: str, options: LoadOptions) -> None:
        self.records: list[Record] = []
        self._url = url
        self._model = model
        self._options = options
        self._began_s = time.monotonic()
        self._stopped = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send within the block; at its end wait for what is still open."""
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(
                base_url=self._url, limits=limits, timeout=None, trust_env=False
            ) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._options.clients):
                group.create_task(self._client(http, number))
            try:
                yield
            finally:
                self._stopped = True

    async def amid_wave(self) -> None:
        """Wait for the middle of a wave: requests are open on every replica then."""
        options = self._options
        period_s = options.wave_s + options.calm_s
        at_s = (time.monotonic() - self._began_s) % period_s
        await asyncio.sleep((options.wave_s / 2 - at_s) % period_s)

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        options = self._options
        rng = random.Random(f"{options.seed}/{number}")
        while not self._stopped:
            at_s = (time.monotonic() - self._began_s) % (options.wave_s + options.calm_s)
            if at_s > options.wave_s and number >= CALM_CLIENTS:
                await asyncio.sleep(0.1)
                continue
            record = Record(
                stream=rng.random() < options.stream_share,
                wanted_tokens=rng.randint(*options.output_tokens),
                started_s=time.monotonic(),
            )
            prompt = [
                rng.randrange(3, options.vocabulary)
                for _ in range(rng.randint(*options.prompt_tokens))
            ]
            try:
                async with asyncio.timeout(options.deadline_s):
                    await self._send(http, record, prompt)
            except TimeoutError:
                record.ending = Ending.HUNG
            record.ended_s = time.monotonic()
            self.records.append(record)

    async def _send(self, http: httpx.AsyncClient, record: Record, prompt: list[int]) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": record.wanted_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": record.stream,
        }
        while True:
            try:
                await (_stream if record.stream else _whole)(http, record, body)
                return
            except _BrokenError:
                record.resent += 1
                await asyncio.sleep(RESEND_PAUSE_S)


async def _whole(http: httpx.AsyncClient, record: Record, body: dict[str, object]) -> None:
    try:
        response = await http.post("/v1/completions", json=body)
    except httpx.TransportError as error:
        raise _BrokenError from error
    if response.status_code != httpx.codes.OK:
        _end(record, Ending.LOST, f"HTTP {response.status_code}: {response.text}")
        return
    record.tokens = response.json()["usage"]["completion_tokens"]
    _end_of_answer(record, record.tokens)


async def _stream(http: httpx.AsyncClient, record: Record, body: dict[str, object]) -> None:
    begun = False
    told_tokens: int | None = None
    # A server marks the end of a stream also where it was cut short: only the usage tells.
    body = {**body, "stream_options": {"include_usage": True}}
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            begun = True
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                _end(record, Ending.LOST, f"HTTP {response.status_code}: {text}")
                return
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    _end_of_answer(record, told_tokens)
                    return
                if line == data:
                    continue
                event = json.loads(data)
                if "error" in event:
                    _end(record, Ending.ERROR if record.tokens else Ending.LOST, data)
                    return
                told_tokens = (event.get("usage") or {}).get("completion_tokens", told_tokens)
                record.tokens += sum(_tokens_of(choice) for choice in event.get("choices", ()))
            _end(record, Ending.CUT if record.tokens else Ending.LOST, "ended without [DONE]")
    except httpx.TransportError as error:
        if not begun:
            raise _BrokenError from error
        _end(record, Ending.CUT, f"{type(error).__name__}: {error}")


def _tokens_of(choice: dict[str, object]) -> int:
    return int(bool(choice.get("text")) or choice.get("finish_reason") is None)


def _end_of_answer(record: Record, told_tokens: int | None) -> None:
    """Judge an answer that ended well. An event may hold several tokens, but none holds less."""
    if told_tokens == record.wanted_tokens and 0 < record.tokens <= told_tokens:
        _end(record, Ending.OK, "")
    else:
        told = "no usage" if told_tokens is None else f"a usage of {told_tokens} tokens"
        _end(record, Ending.WRONG, f"{record.tokens} with {told}, not {record.wanted_tokens}")


def _end(record: Record, ending: Ending, reason: str) -> None:
    record.ending = ending
    record.reason = reason[:REASON_CHARS]
