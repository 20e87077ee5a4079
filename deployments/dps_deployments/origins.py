"""Tells in a response how many of its tokens were made in full and how many in fast mode."""

import json
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

FIELD = "dps"


class FullModeMissedError(Exception):
    """The engine ended a request that waited for full mode in vain."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(waited_s)
        self.waited_s = waited_s


class Origins:
    """Tokens of one API request by the mode that made them, as its engine requests end."""

    def __init__(self) -> None:
        self.full = 0
        self.fast = 0
        self.known = False
        """Some engine request has ended and said so; never on an engine that is not elastic."""
        self.missed_s: float | None = None
        """How long some engine request waited for full mode in vain, seconds."""

    def note(self, output: Any) -> None:
        """Read one output of the engine; the last one of each request carries the sums."""
        told = output.kv_transfer_params
        if told is not None and "dps_tokens_full" in told:
            self.full += told["dps_tokens_full"]
            self.fast += told["dps_tokens_fast"]
            self.known = True
            self.missed_s = told.get("dps_gave_up_after_s", self.missed_s)
            output.kv_transfer_params = None

    def as_dict(self) -> dict[str, int]:
        return {"tokens_full": self.full, "tokens_fast": self.fast}


_CURRENT: ContextVar[Origins | None] = ContextVar("dps_origins", default=None)


def observed(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Wrap an engine's ``generate`` so that it tells the origins of the request in progress."""

    async def noted(outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        origins = _CURRENT.get()
        async for output in outputs:
            if origins is not None:
                origins.note(output)
                _check_missed(origins)
            yield output

    def wrapper(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        # What the engine refuses at once must not wait for the first output to be asked for.
        return noted(generate(*args, **kwargs))

    return wrapper


async def tell_origins(responses: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Add the origins to a response object, or to the last chunks of a stream of events.

    Only chunks that end a choice or carry the usage are opened: the others pass as they are.

    Raises
    ------
    FullModeMissedError
        When the engine ended the request because full mode did not come; a server may have made
        an event of that error.
    """
    origins = Origins()
    _CURRENT.set(origins)
    async for response in responses:
        _check_missed(origins)
        if not origins.known:
            yield response
        elif isinstance(response, str):
            yield _with_field(response, origins)
        else:
            usage = getattr(response, "usage", None)
            if usage is not None:
                setattr(usage, FIELD, origins.as_dict())
            yield response


def _check_missed(origins: Origins) -> None:
    if origins.missed_s is not None:
        raise FullModeMissedError(origins.missed_s)


def _with_field(event: str, origins: Origins) -> str:
    ends_choice = '"finish_reason":"' in event
    if not event.startswith("data: {") or not (ends_choice or '"usage":{' in event):
        return event
    chunk = json.loads(event.removeprefix("data: "))
    chunk[FIELD] = origins.as_dict()
    if chunk.get("usage"):
        chunk["usage"][FIELD] = origins.as_dict()
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
