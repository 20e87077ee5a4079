"""Streaming client of an OpenAI-compatible completions endpoint that times every piece."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.config import DpsConfigError

CAPACITY_STATUSES = (429, 503)
REASON_LENGTH = 300


@dataclass(frozen=True)
class ClientOptions:
    """How requests are made."""

    model: str
    request_timeout_s: float = 600.0
    """Longest wait for the next byte, seconds."""
    ignore_eos: bool = True
    """Ask for exactly the wanted number of tokens (an extension of vLLM and SGLang)."""
    headers: tuple[tuple[str, str], ...] = ()
    """Extra headers of every request, for example ``X-DPS-Precision``."""


class CompletionClient:
    """Sends completions to one server.

    Parameters
    ----------
    http
        Client whose base URL is the server's root.
    options
        How requests are made.
    clock
        Monotonic time, seconds.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        options: ClientOptions,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._http = http
        self._options = options
        self._clock = clock

    async def complete(
        self, record: RequestRecord, prompt: str | list[int], origin_s: float
    ) -> RequestRecord:
        """Stream one completion into ``record``; errors become its outcome, never an exception."""
        body: dict[str, Any] = {
            "model": self._options.model,
            "prompt": prompt,
            "max_tokens": record.requested_output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.ignore_eos:
            body["ignore_eos"] = True
        try:
            async with self._http.stream(
                "POST",
                "/v1/completions",
                json=body,
                headers=dict(self._options.headers),
                timeout=self._options.request_timeout_s,
            ) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    rejected = response.status_code in CAPACITY_STATUSES
                    record.outcome = Outcome.REJECTED if rejected else Outcome.FAILED
                    record.reason = f"HTTP {response.status_code}: {response.text}"[:REASON_LENGTH]
                else:
                    await self._read_stream(response, record, origin_s)
        except (httpx.HTTPError, ValueError) as error:
            record.outcome = Outcome.FAILED
            record.reason = f"{type(error).__name__}: {error}"[:REASON_LENGTH]
        record.end_s = self._clock() - origin_s
        return record

    async def _read_stream(
        self, response: httpx.Response, record: RequestRecord, origin_s: float
    ) -> None:
        finished = False
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                finished = True
                break
            event = json.loads(data)
            if "error" in event:
                record.reason = f"error in stream: {event['error']}"[:REASON_LENGTH]
                return
            if event.get("choices"):
                record.chunk_times_s.append(self._clock() - origin_s)
            usage = event.get("usage")
            if usage:
                record.prompt_tokens = usage["prompt_tokens"]
                record.output_tokens = usage["completion_tokens"]
        if not finished:
            record.reason = "the stream ended early"
        elif not record.chunk_times_s:
            record.reason = "the answer holds no token"
        else:
            record.outcome = Outcome.OK


def open_http(url: str) -> httpx.AsyncClient:
    """Client of the server at ``url`` (its root, or with ``/v1``), without a connection limit."""
    root = url.rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=root, limits=limits, timeout=30.0, trust_env=False)


async def served_model(http: httpx.AsyncClient) -> str:
    """Name of the only model a server offers.

    Raises
    ------
    DpsConfigError
        The server cannot be reached, or offers no model or several.
    """
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        names = [entry["id"] for entry in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise DpsConfigError(
            f"--url is {str(http.base_url)!r}: no server answers /v1/models there "
            f"({type(error).__name__}: {error}); start one, or name the model with --model"
        ) from None
    if len(names) != 1:
        raise DpsConfigError(f"--model is not given and the server offers {names}: choose one")
    return str(names[0])
