"""The models that the engine benchmarks run, and the engines they run on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dps_ray.checks.specs import EngineSpec
from dps_ray.config import DpsConfigError
from dps_ray.models.smollm2 import prepare_smollm2
from dps_ray.models.tiny import TINY, make_tiny

TINY_PREFIX = "tiny:"
PLAIN, FULL, FAST, DPS, FREE = "plain", "full", "fast", "dps", "free memory"
PINS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    FULL: {"pin": "full", "lend": False},
    FAST: {"pin": "fast", "lend": False},
}


def model_folder(name: str, dtype: str, root: Path) -> Path:
    """Folder of ``smollm2`` or ``tiny:NAME``, made when missing; anything else is a folder.

    Raises
    ------
    DpsConfigError
        There is no such model.
    """
    if name == "smollm2":
        return prepare_smollm2(root, dtype=dtype)
    if name.startswith(TINY_PREFIX):
        return make_tiny(name.removeprefix(TINY_PREFIX), root, dtype=dtype)
    if Path(name, "config.json").is_file():
        return Path(name)
    tiny = ", ".join(TINY_PREFIX + key for key in TINY)
    raise DpsConfigError(f"--model is {name!r}: give smollm2, {tiny} or a model folder")


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
