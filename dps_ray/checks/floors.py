"""Requests that insist on full precision among many that do not."""

from typing import Any

from dps_ray.checks.engine import Engine
from dps_ray.checks.requests import floor_prompts, insists
from dps_ray.modes import Floor

HEAD_START_STEPS = 12
"""Steps in which requests of any precision fill the memory before others arrive."""


def floors(
    engine: Engine, *, count: int = 2000, arriving: int = 100, max_tokens: int = 16
) -> dict[str, Any]:
    """Waves of requests, some of which insist on full precision.

    Those come last in odd waves, when the others have made the replica go fast, and first in even
    ones.
    """
    prompts = floor_prompts(count)
    insisting: dict[int, str] = {}
    outputs: dict[str, Any] = {}
    for wave, start in enumerate(range(0, count, arriving)):
        numbers = range(start, min(start + arriving, count))
        chosen = [number for number in numbers if insists(number)]
        others = [prompts[number] for number in numbers if not insists(number)]
        names = [] if wave % 2 == 0 else engine.start(others, max_tokens, logprobs=1)
        for _ in range(HEAD_START_STEPS):
            outputs.update((o.request_id, o) for o in engine.step() if o.finished)
        texts = [prompts[number] for number in chosen]
        full = engine.start(texts, max_tokens, logprobs=1, precision=Floor.FULL)
        insisting.update(zip(chosen, full, strict=True))
        if not names:
            names = engine.start(others, max_tokens, logprobs=1)
        outputs.update(engine.finish([n for n in [*names, *full] if n not in outputs]))
    result: dict[str, Any] = {
        "tokens": {n: list(outputs[name].outputs[0].token_ids) for n, name in insisting.items()},
        "finished": len(outputs),
    }
    if engine.elastic:
        made = [outputs[name].kv_transfer_params for name in insisting.values()]
        result["insisting_fast_tokens"] = sum(each["dps_tokens_fast"] for each in made)
        result["insisting_full_tokens"] = sum(each["dps_tokens_full"] for each in made)
        status = engine.status
        for name in ("tokens_full", "tokens_fast", "switches_to_fast"):
            result[name] = getattr(status, name)
    return result


def floor_answers(engine: Engine, *, count: int, max_tokens: int) -> dict[str, Any]:
    """Greedy answers to all those requests, in whatever precision the engine has."""
    names = engine.start(floor_prompts(count), max_tokens)
    outputs = engine.finish(names)
    return {"tokens": [list(outputs[name].outputs[0].token_ids) for name in names]}
