"""The engines that the engine benchmarks compare."""

from dataclasses import replace
from typing import Any

from dps_ray.checks.specs import EngineSpec

PLAIN, FULL, FAST, DPS, FREE = "plain", "full", "fast", "dps", "free memory"
PINS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    FULL: {"pin": "full", "lend": False},
    FAST: {"pin": "fast", "lend": False},
}


def pinned(base: EngineSpec) -> dict[str, EngineSpec]:
    """Plain vLLM, full mode and fast mode on the same memory."""
    return {
        name: replace(base, label=f"{base.label} {name}", dps=dps) for name, dps in PINS.items()
    }


def pressed(base: EngineSpec, free_kv_bytes: int, options: dict[str, Any]) -> dict[str, EngineSpec]:
    """Plain vLLM, DPS on the same memory, and plain vLLM given more memory for nothing."""
    return {
        PLAIN: replace(base, label=f"{base.label} {PLAIN}"),
        DPS: replace(base, label=f"{base.label} {DPS}", dps=options),
        FREE: replace(base, label=f"{base.label} {FREE}", kv_bytes=free_kv_bytes),
    }
