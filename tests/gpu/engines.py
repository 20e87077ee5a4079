"""The engines that the tests on a GPU build; ``tests/engine/test_gpu_engines`` configures them all.

Engines with graphs run the fused kernels: what replaces them cannot be captured.
"""

from dataclasses import replace

from dps_ray.checks.specs import EngineSpec
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

MODELS = ("qwen3", "qwen3-moe")
GRAPHS = ("eager", "lazy")


def switching(name: str, graphs: str) -> EngineSpec:
    """An engine that runs the same few requests in full, in fast and again in full mode.

    The prompts have fewer tokens together than FP8 activations take: their rounding would turn
    other last bits into other codes.
    """
    return EngineSpec(
        label=f"{name}, graphs {graphs}",
        model=str(make_tiny(name, cache_root())),
        kv_bytes=256 << 20,
        max_model_len=512,
        block_size=16,
        enable_prefix_caching=False,
        compiled=True,
        dps={"lend": False, "graphs": graphs},
        scenario="switches",
        arguments={"count": 4, "shortest": 8, "longest": 15},
    )


def lending() -> EngineSpec:
    """An engine whose base blocks hold less than half of a burst."""
    return replace(
        switching("qwen3", "eager"),
        label="lending",
        kv_bytes=4 << 20,
        engine_arguments={"async_scheduling": True},
        dps={"min_fast_dwell_s": 0.0},
        scenario="burst",
        arguments={"count": 12, "prompt_tokens": 96, "max_tokens": 96},
    )


def without_graphs(spec: EngineSpec) -> EngineSpec:
    """The same engine, run eagerly."""
    return replace(spec, label=f"{spec.label}, run eagerly", compiled=False)


def every_engine() -> list[EngineSpec]:
    """One of each."""
    captured = [switching(name, graphs) for name in MODELS for graphs in GRAPHS]
    return [*captured, *map(without_graphs, captured), lending()]
