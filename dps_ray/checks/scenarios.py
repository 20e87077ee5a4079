"""What the engine checks make a running engine do, and what they note of it."""

import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

from torch._dynamo.utils import counters as dynamo

from dps_ray.checks.engine import Engine
from dps_ray.checks.features import features
from dps_ray.checks.floors import floor_answers, floors
from dps_ray.checks.layers import full_layers
from dps_ray.checks.requests import logprobs_of, prompts
from dps_ray.checks.shadow import cycles_under_load, shadow
from dps_ray.checks.tape import replay
from dps_ray.engine import rank as ranks
from dps_ray.modes import Mode, Pin


def generate(
    engine: Engine, *, count: int = 4, shortest: int = 20, longest: int = 90, max_tokens: int = 20
) -> dict[str, Any]:
    """Greedy tokens and the five best logprobs of each, exact to the bit."""
    names = engine.start(prompts(count, shortest, longest), max_tokens, logprobs=5)
    outputs = engine.finish(names)
    result: dict[str, Any] = {
        "tokens": [list(outputs[name].outputs[0].token_ids) for name in names],
        "logprobs": [logprobs_of(outputs[name]) for name in names],
        "nans": _nans(outputs[name] for name in names),
    }
    if engine.elastic:
        result["status"] = _figures(engine)
        result["formats"] = engine.llm.collective_rpc("dps_load_report")[0]["totals"]["formats"]
        result["units_lent"] = engine.scheduler.sum_manager.counters.units_lent
    return result


def burst(
    engine: Engine, *, count: int = 12, prompt_tokens: int = 160, max_tokens: int = 160
) -> dict[str, Any]:
    """Many long requests at once, then, on an elastic engine, the way back to full mode."""
    names = engine.start(prompts(count, prompt_tokens, prompt_tokens), max_tokens, logprobs=1)
    outputs = engine.finish(names)
    result: dict[str, Any] = {
        "tokens": [list(outputs[name].outputs[0].token_ids) for name in names],
        "nans": _nans(outputs[name] for name in names),
        "preemptions": engine.preemptions(),
    }
    if engine.elastic:
        result["returned_to_full"] = engine.return_to_full()
        result["ranks"] = engine.verify_ranks()
        result["status"] = _figures(engine)
    return result


def cycles(
    engine: Engine, *, count: int = 200, residents: int = 2, per_resident: int = 25
) -> dict[str, Any]:
    """Forced switch cycles around resident requests whose KV bytes must not change.

    Each cycle pins the replica to fast mode, makes fillers borrow weight memory, lets them end
    and pins it back to full mode, which restores every unit. The residents' full blocks are
    hashed on both sides of every cycle.
    """
    filler_tokens = engine.status.base_blocks * engine.spec.block_size
    counters = engine.scheduler.sum_manager.counters
    corrupted = watched = lending = 0
    for cycle in range(count):
        if cycle % per_resident == 0:
            names = engine.start(prompts(residents, 70, 70, seed=cycle), 3000)
            _settle(engine, residents)
        before = _block_hashes(engine)
        engine.pin(Pin.FAST)
        lent = counters.units_lent
        engine.finish(engine.start(prompts(1, filler_tokens, filler_tokens, seed=cycle), 1))
        lending += counters.units_lent > lent
        engine.pin(Pin.FULL)
        if not engine.return_to_full():
            break
        after = _block_hashes(engine)
        corrupted += sum(after[block] != digest for block, digest in before.items())
        watched += len(before)
        if cycle % per_resident == per_resident - 1:
            engine.llm.llm_engine.abort_request(names)
            engine.step()
    return {
        "corrupted_blocks": corrupted,
        "blocks_watched": watched,
        "cycles_lending": lending,
        "ranks": engine.verify_ranks(),
        "status": _figures(engine),
    }


def long_request(
    engine: Engine, *, age_tokens: int = 1000, more_tokens: int = 300, fillers: int = 4
) -> dict[str, Any]:
    """A request that began amid a burst, in lent memory, and goes on long after it.

    Counts what the request makes from the burst's end on, and how much of that in fast mode.
    """
    block = decoded = engine.spec.block_size
    filler_tokens = engine.status.base_blocks * block // fillers
    burst = engine.start(prompts(fillers, filler_tokens, filler_tokens), decoded)
    _settle(engine, fillers)
    (name,) = engine.start(
        prompts(1, age_tokens - decoded, age_tokens - decoded, seed=1), decoded + more_tokens
    )
    engine.finish(burst)
    ended_s = time.monotonic()
    steps = fast_steps = 0
    fast_s: float | None = None
    running = True
    while running:
        running = not any(out.finished and out.request_id == name for out in engine.step())
        steps += 1
        fast_steps += engine.scheduler.mode is Mode.FAST
        if fast_s is None and engine.scheduler.mode is Mode.FULL:
            fast_s = time.monotonic() - ended_s
    return {
        "steps": steps,
        "fast_steps": fast_steps,
        "seconds": time.monotonic() - ended_s,
        "fast_seconds": time.monotonic() - ended_s if fast_s is None else fast_s,
        "blocks_moved": engine.scheduler.sum_manager.counters.blocks_moved,
        "ranks": engine.verify_ranks(),
    }


def prefixes(engine: Engine, *, prompt_tokens: int, max_tokens: int = 16) -> dict[str, Any]:
    """One prompt in fast mode, then several times in full mode: what each took from the cache."""
    (prompt,) = prompts(1, prompt_tokens, prompt_tokens)

    def ask(precision: str | None = None) -> dict[str, Any]:
        (name,) = engine.start([prompt], max_tokens, logprobs=1, precision=precision)
        output = engine.finish([name])[name]
        return {
            "cached_tokens": output.num_cached_tokens,
            "output": [list(output.outputs[0].token_ids), logprobs_of(output)],
        }

    engine.pin(Pin.FAST)
    engine.step()
    answers = {"fast": ask()}
    engine.pin(Pin.FULL)
    engine.return_to_full()
    answers["full"] = ask()
    answers["full, floor"] = ask("full")
    answers["full, floor again"] = ask("full")
    engine.scheduler.reset_prefix_cache()
    answers["full, nothing cached"] = ask()
    return answers


def switches(engine: Engine, **arguments: int) -> dict[str, Any]:
    """The same requests in full, fast and again full mode, on an engine that is pinned to each."""
    result: dict[str, Any] = {}
    for name, pin in (("full", Pin.FULL), ("fast", Pin.FAST), ("full again", Pin.FULL)):
        engine.pin(pin)
        result[name] = generate(engine, **arguments)
        result[name]["graphs_compiled"] = dynamo["stats"]["unique_graphs"]
    return result


def layers(engine: Engine, *, chosen: list[list[int]], **arguments: int) -> dict[str, Any]:
    """The same requests in fast mode with each choice of layers in full precision."""
    runs = []
    for choice in chosen:
        with full_layers(engine, choice):
            runs.append(generate(engine, **arguments))
        runs[-1]["graphs_compiled"] = dynamo["stats"]["unique_graphs"]
    return {"runs": runs}


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    "generate": generate,
    "burst": burst,
    "cycles": cycles,
    "cycles_under_load": cycles_under_load,
    "shadow": shadow,
    "long_request": long_request,
    "prefixes": prefixes,
    "switches": switches,
    "layers": layers,
    "floors": floors,
    "floor_answers": floor_answers,
    "features": features,
    "replay": replay,
}


def _settle(engine: Engine, running: int) -> None:
    """Step until the residents decode."""
    while len(engine.scheduler.running) < running or engine.scheduler.waiting:
        engine.step()
    engine.step()


def _block_hashes(engine: Engine) -> dict[int, str]:
    """Digest of every block that a running request has filled, by block id."""
    memory = ranks.current().memory
    assert memory is not None
    kv = memory.region.kv_tensor
    stride = memory.region.geometry.block_stride_bytes
    hashes = {}
    for request in engine.scheduler.running:
        full = request.num_computed_tokens // engine.spec.block_size
        (ids,) = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for block in ids[:full]:
            content = kv[block * stride : (block + 1) * stride]
            hashes[block] = hashlib.blake2b(content.numpy().tobytes(), digest_size=16).hexdigest()
    return hashes


def _nans(outputs: Any) -> int:
    """Logprobs that are not numbers."""
    return sum(
        not math.isfinite(value.logprob)
        for output in outputs
        for step in output.outputs[0].logprobs
        for value in step.values()
    )


def _figures(engine: Engine) -> dict[str, Any]:
    status = engine.status
    return {
        name: getattr(status, name)
        for name in (
            "base_blocks",
            "total_blocks",
            "units",
            "units_backed",
            "preemptions",
            "tokens_full",
            "tokens_fast",
            "tokens_mixed",
            "switches_to_fast",
            "switches_to_full",
            "restored_bytes",
            "restore_busy_s",
            "restores_cancelled",
            "last_restore_s",
            "fault",
        )
    }
