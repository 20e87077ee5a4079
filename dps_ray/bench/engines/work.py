"""What a benchmark asks of an engine, and the figures it gives back."""

import time
from collections.abc import Callable
from typing import Any

from dps_ray.bench.engines.burst_end import burst_end
from dps_ray.bench.engines.return_work import by_layers, way_back
from dps_ray.checks.engine import Engine
from dps_ray.modes import Mode


def decode(engine: Engine, *, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Generate ``tokens`` tokens for each prompt, all at once.

    The clock starts when every prompt has its first token: prefill is not part of the speed.
    """
    names = engine.start(prompts, tokens)
    engine.prefill()
    made = sum(request.num_output_tokens for request in engine.scheduler.running)
    began_s = time.perf_counter()
    engine.finish(names)
    elapsed_s = time.perf_counter() - began_s
    return {"tokens_per_s": (len(prompts) * tokens - made) / elapsed_s}


def burst(engine: Engine, *, prompts: list[list[int]], outputs: list[int]) -> dict[str, Any]:
    """Send all requests at once and run until the last has ended."""
    preempted = engine.preemptions()
    began_s = time.perf_counter()
    missing = {
        name
        for prompt, tokens in zip(prompts, outputs, strict=True)
        for name in engine.start([prompt], tokens)
    }
    peak = steps = fast_steps = 0
    while missing:
        missing -= {output.request_id for output in engine.step() if output.finished}
        peak = max(peak, _used_blocks(engine))
        steps += 1
        fast_steps += engine.elastic and engine.scheduler.mode is Mode.FAST
    elapsed_s = time.perf_counter() - began_s
    return {
        "requests_per_s": len(prompts) / elapsed_s,
        "steps": steps,
        "fast_share": fast_steps / steps,
        "kv_peak_bytes": peak * _block_bytes(engine),
        "preemptions": engine.preemptions() - preempted,
    }


def settle(engine: Engine) -> dict[str, Any]:
    """Let an elastic engine return to full mode; says how long that took."""
    began_s = time.perf_counter()
    returned = not engine.elastic or engine.return_to_full()
    return {"returned": returned, "settle_s": time.perf_counter() - began_s}


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "decode": decode,
    "burst": burst,
    "settle": settle,
    "burst_end": burst_end,
    "by_layers": by_layers,
    "way_back": way_back,
}


def _used_blocks(engine: Engine) -> int:
    pool = engine.scheduler.kv_cache_manager.block_pool
    if engine.elastic:
        return int(pool.live_blocks)
    # vLLM's null block is neither free nor in use.
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def _block_bytes(engine: Engine) -> int:
    """Bytes of one KV block over all layers, padding left out."""
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    return sum(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
