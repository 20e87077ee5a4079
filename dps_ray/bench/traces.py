"""Request traces: arrival times and lengths, and the ways to fit them to a test system."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from dps_ray.config import DpsConfigError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Arrival after the trace's origin, seconds."""
    prompt_tokens: int
    output_tokens: int


def from_origin(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Sort by arrival and move the first arrival to 0."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    if not ordered:
        return []
    origin_s = ordered[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - origin_s) for request in ordered]


def window(requests: Sequence[TraceRequest], start_s: float, end_s: float) -> list[TraceRequest]:
    """Requests with ``start_s <= arrival_s < end_s``; ``start_s`` becomes the origin.

    Raises
    ------
    DpsConfigError
        The window holds no request.
    """
    chosen = [
        replace(request, arrival_s=request.arrival_s - start_s)
        for request in requests
        if start_s <= request.arrival_s < end_s
    ]
    if not chosen:
        last_s = max((request.arrival_s for request in requests), default=0.0)
        raise DpsConfigError(
            f"window {start_s:g} to {end_s:g} s holds no request: the trace lasts {last_s:.1f} s"
        )
    return chosen


def speed_up(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Divide every arrival time by ``factor``.

    Raises
    ------
    DpsConfigError
        The factor is not a positive number.
    """
    _require_positive("speed", factor)
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]


def repeat(requests: Sequence[TraceRequest], copies: int, spread_s: float) -> list[TraceRequest]:
    """Each request ``copies`` times, evenly over the ``spread_s`` seconds after its arrival."""
    return from_origin(
        replace(request, arrival_s=request.arrival_s + copy * spread_s / copies)
        for request in requests
        for copy in range(copies)
    )


def resize(
    requests: Sequence[TraceRequest],
    *,
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[TraceRequest]:
    """Scale lengths, then clip them; no length falls below one token.

    Raises
    ------
    DpsConfigError
        A scale or a limit is not positive.
    """
    _require_positive("prompt scale", prompt_scale)
    _require_positive("output scale", output_scale)
    for name, limit in (
        ("max prompt tokens", max_prompt_tokens),
        ("max output tokens", max_output_tokens),
    ):
        if limit is not None:
            _require_positive(name, limit)
    return [
        replace(
            request,
            prompt_tokens=_length(request.prompt_tokens, prompt_scale, max_prompt_tokens),
            output_tokens=_length(request.output_tokens, output_scale, max_output_tokens),
        )
        for request in requests
    ]


def fit_context(requests: Sequence[TraceRequest], max_model_len: int) -> list[TraceRequest]:
    """Shorten prompts, then outputs, so that every request fits a context of ``max_model_len``.

    Raises
    ------
    DpsConfigError
        The context cannot hold one prompt token and one output token.
    """
    if max_model_len < 2:
        raise DpsConfigError(f"max model length is {max_model_len}: give at least 2 tokens")
    fitted = []
    for request in requests:
        output_tokens = min(request.output_tokens, max_model_len - 1)
        prompt_tokens = min(request.prompt_tokens, max_model_len - output_tokens)
        fitted.append(replace(request, prompt_tokens=prompt_tokens, output_tokens=output_tokens))
    return fitted


def _length(tokens: int, scale: float, limit: int | None) -> int:
    scaled = max(1, round(tokens * scale))
    return scaled if limit is None else min(scaled, limit)


def _require_positive(name: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise DpsConfigError(f"{name} is {value}: give a number above 0")
