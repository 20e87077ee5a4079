"""What stands before a replica's engine: precision floors, token origins, the engine's death."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from dps_deployments.origins import FullModeMissedError, observed, tell_origins
from dps_deployments.refusals import bad_request, precision_unavailable, replica_lost
from dps_deployments.requests import (
    PRECISION_FIELD,
    PRIORITY_HEADER,
    floor_of,
    leave_wait,
    priority_of,
    wait_of,
)
from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.fleet.waiting import rank_of
from dps_ray.modes import Floor, Mode

POLL_PERIOD_S = 0.02
RANKS_PER_S = 1000.0
MAX_PRIORITY = 2**62
"""The engine's messages hold priorities of 64 bits."""


class EngineGate:
    """Stands before an engine's ``chat`` and ``completions``.

    The engine itself holds a request that insists on full precision back until it is in full mode;
    the gate is what gives up in time. A request that meets a dying engine ends with
    ``ReplicaLostError``: the ingress sends it elsewhere, or ends its stream if that has begun.

    Parameters
    ----------
    read_mode
        The engine's mode; ``None`` when it is not known.
    read_options
        The operator's bounds on waiting, which may change.
    priorities
        The engine schedules by priority.
    """

    def __init__(
        self,
        read_mode: Callable[[], Mode | None],
        read_options: Callable[[], AdmissionOptions],
        *,
        priorities: bool = False,
    ) -> None:
        self._read_mode = read_mode
        self._read_options = read_options
        self._priorities = priorities
        self._waiting = 0
        self._look: asyncio.Task[None] | None = None

    def guard(self, engine: Any, client: Any) -> None:
        """Put the gate before an engine of ``ray.serve.llm`` and its vLLM client."""
        client.generate = observed(client.generate)
        for method in ("chat", "completions"):
            setattr(engine, method, self._guarded(getattr(engine, method), client))

    def _guarded(
        self, method: Callable[..., AsyncIterator[Any]], client: Any
    ) -> Callable[..., Any]:
        async def guarded(request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
            headers = getattr(raw_request_info, "headers", None)
            floor = floor_of(request, headers)
            # The engine reads the body alone: there the header must win over it too.
            if floor is not Floor.ANY or PRECISION_FIELD in (request.vllm_xargs or {}):
                request.vllm_xargs = {**(request.vllm_xargs or {}), PRECISION_FIELD: floor.value}
            if self._priorities:
                self._set_rank(request, headers)
            try:
                if floor is Floor.FULL:
                    _refuse_beams(request)
                    left_s = await self._wait_for_full(wait_of(request, headers))
                    # The engine may go fast before it takes the request in: the rest of the wait
                    # goes with it.
                    leave_wait(request, left_s)
                async for response in tell_origins(method(request, raw_request_info)):
                    if client.errored and _is_error(response):
                        raise replica_lost("the engine has ended")
                    yield response
            except FullModeMissedError as missed:
                retry_after_s = self._read_options().min_retry_after_s
                raise precision_unavailable(missed.waited_s, retry_after_s) from None
            except Exception as error:
                if not client.errored:
                    raise
                raise replica_lost(type(error).__name__) from error

        return guarded

    def _set_rank(self, request: Any, headers: Any) -> None:
        """Let the engine serve by rank: by bare priorities the least urgent could starve in it."""
        ageing_s = self._read_options().priority_ageing_s
        rank_s = rank_of(priority_of(request, headers), time.monotonic(), ageing_s)
        request.priority = round(max(-MAX_PRIORITY, min(RANKS_PER_S * rank_s, MAX_PRIORITY)))
        # In vLLM the header beats the body.
        for name in [name for name in headers or () if name.lower() == PRIORITY_HEADER]:
            del headers[name]

    async def _wait_for_full(self, asked_s: float | None) -> float:
        """Wait until the engine is in full mode; how much longer the request may wait, seconds."""
        options = self._read_options()
        limit_s = options.longest_full_wait_s(asked_s)
        if self._read_mode() is not Mode.FAST:
            return limit_s
        started_s = time.monotonic()
        # One looks for all who wait: a look costs a tenth of a millisecond.
        if self._look is None or self._look.done() or self._look.cancelling():
            self._look = asyncio.create_task(self._look_for_full())
        look = self._look
        self._waiting += 1
        try:
            done, _ = await asyncio.wait({look}, timeout=limit_s)
        finally:
            self._waiting -= 1
            if not self._waiting:
                look.cancel()
        if not done:
            raise precision_unavailable(time.monotonic() - started_s, options.min_retry_after_s)
        look.result()
        return max(0.0, limit_s - (time.monotonic() - started_s))

    async def _look_for_full(self) -> None:
        while self._read_mode() is Mode.FAST:
            await asyncio.sleep(POLL_PERIOD_S)


def _refuse_beams(request: Any) -> None:
    """vLLM makes the requests of a beam search anew, without the arguments of the original."""
    if getattr(request, "use_beam_search", False):
        raise bad_request(
            "use_beam_search is True: a beam search has no precision floor; leave out "
            "X-DPS-Precision: full, or ask for n samples"
        )


def _is_error(response: Any) -> bool:
    """Whether this is how vLLM or Ray tell an error: an event of a stream, or an object."""
    if isinstance(response, str):
        return response.startswith('data: {"error"')
    return hasattr(response, "error")
