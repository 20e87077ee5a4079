"""Requests that insist on full precision among many that do not, beside a 16-bit engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dps_ray.checks.engine import Engine
from dps_ray.checks.process import run_engines
from dps_ray.checks.requests import prompts
from dps_ray.checks.specs import AMPLE_KV_BYTES, BLOCK_TOKENS, EXACT, EngineSpec, block_bytes
from dps_ray.modes import Floor
from dps_ray.report import Report

BASE_BLOCKS = 24
"""A wave of requests asks for several times as much."""
EVERY = 10
"""One request in so many insists on full precision."""
HEAD_START_STEPS = 12
"""Steps in which requests of any precision fill the memory before others arrive."""


def floors(
    engine: Engine, *, count: int = 2000, arriving: int = 100, max_tokens: int = 16
) -> dict[str, Any]:
    """Waves of requests, some of which insist on full precision.

    Those come last in odd waves, when the others have made the replica go fast, and first in even
    ones. All share a prefix, which the prefix cache may hold in either precision.
    """
    shared, tails = prompts(1, 64, 64)[0], prompts(count, 20, 60, seed=1)
    insisting: dict[int, str] = {}
    outputs: dict[str, Any] = {}
    for wave, start in enumerate(range(0, count, arriving)):
        numbers = range(start, min(start + arriving, count))
        chosen = [number for number in numbers if number % EVERY == 0]
        others = [shared + tails[number] for number in numbers if number % EVERY]
        names = [] if wave % 2 == 0 else engine.start(others, max_tokens, logprobs=1)
        for _ in range(HEAD_START_STEPS):
            outputs.update((o.request_id, o) for o in engine.step() if o.finished)
        texts = [shared + tails[number] for number in chosen]
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


def check_floors(folder: Path, requests: int) -> Callable[[Report, Callable[[str], None]], None]:
    """Run the same requests on a static 16-bit and on an elastic engine; the judge of both.

    Parameters
    ----------
    folder
        The model.
    requests
        Requests over all waves.
    """
    options: dict[str, Any] = {
        "model": str(folder),
        "max_model_len": 512,
        "max_num_seqs": 64,
        "block_size": BLOCK_TOKENS,
        "scenario": "floors",
        "arguments": {"count": requests},
    }
    small = BASE_BLOCKS * block_bytes(folder)
    plain, elastic = run_engines(
        [
            EngineSpec(label="floors: plain", kv_bytes=AMPLE_KV_BYTES, **options),
            EngineSpec(label="floors: dps", kv_bytes=small, dps=EXACT, **options),
        ],
        1800.0,
    )

    def judge(report: Report, say: Callable[[str], None]) -> None:
        report.check(
            "floors: every request that insists on full precision equals the 16-bit engine's",
            plain["tokens"] == elastic["tokens"],
        )
        report.check(
            "floors: none of their tokens was made in fast mode",
            elastic["insisting_fast_tokens"] == 0 and elastic["insisting_full_tokens"] > 0,
        )
        report.check("floors: all requests ended", elastic["finished"] == requests)
        report.check("floors: the others went fast", elastic["tokens_fast"] > 0)
        report.figures["floors"] = {
            "requests": requests,
            "insisting": len(plain["tokens"]),
            **{name: value for name, value in elastic.items() if name != "tokens"},
        }
        say(
            f"floors: {len(plain['tokens'])} of {requests} requests insist on full precision; "
            f"{elastic['tokens_fast']} tokens of the others in fast mode"
        )

    return judge
