"""The part of ``check engine`` about modes: each is what it is on memory that never moves."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dps_ray.checks.parts import Part, Results, Say
from dps_ray.checks.requests import same_outputs
from dps_ray.checks.specs import (
    AMPLE_KV_BYTES,
    BLOCK_TOKENS,
    EXACT,
    EngineSpec,
    block_bytes,
    latent,
)
from dps_ray.report import Report

SMALL_BASE_BLOCKS = 8
FORCED_FAST: dict[str, Any] = {**EXACT, "pin": "fast"}


def check_modes(label: str, folder: Path, ranks: int) -> Part:
    """Full mode against plain vLLM, fast mode on elastic against static KV memory."""
    return Part(mode_specs(label, folder, ranks), partial(_judge, label))


def mode_specs(label: str, folder: Path, ranks: int) -> list[EngineSpec]:
    """Three engines of one model: plain, switching on static KV memory, fast on elastic KV memory.

    The second is asked in full, in fast and again in full mode. No prefix cache: what one mode
    computed would be found by the other.
    """
    plain = EngineSpec(
        label=f"{label}: plain",
        model=str(folder),
        kv_bytes=AMPLE_KV_BYTES,
        tensor_parallel_size=ranks,
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=False,
        # The one that an elastic engine uses, also where vLLM has a faster one.
        attention_backend="CPU_MLA" if latent(folder) else None,
    )
    small = SMALL_BASE_BLOCKS * block_bytes(folder) // ranks
    return [
        plain,
        replace(
            plain,
            label=f"{label}: switching, static KV",
            dps={**EXACT, "lend": False},
            scenario="switches",
        ),
        replace(plain, label=f"{label}: fast, elastic KV", dps=FORCED_FAST, kv_bytes=small),
    ]


def static_fast_spec(label: str, plain: EngineSpec) -> EngineSpec:
    """The engine of ``mode_specs`` that is forced fast, on as much static KV memory as the plain
    one has."""
    return replace(plain, label=f"{label}: fast, static KV", dps={**FORCED_FAST, "lend": False})


def _judge(label: str, report: Report, say: Say, runs: Results) -> None:
    plain, switching, elastic = runs
    full, static, again = (switching[name] for name in ("full", "fast", "full again"))
    report.check(
        f"{label}: full mode equals plain vLLM, tokens and logprobs", same_outputs(plain, full)
    )
    report.check(f"{label}: full mode ran in full mode", full["status"]["tokens_fast"] == 0)
    report.check(f"{label}: full mode after fast mode equals it too", same_outputs(plain, again))
    report.check(
        f"{label}: forced fast on elastic KV equals forced fast on static KV",
        same_outputs(static, elastic),
    )
    report.check(f"{label}: forced fast ran in fast mode", elastic["status"]["tokens_full"] == 0)
    report.check(f"{label}: elastic KV used lent memory", elastic["units_lent"] > 0)
    report.check(f"{label}: fast mode is another precision", not same_outputs(plain, static))
    nans = [run["nans"] for run in (plain, full, static, again, elastic)]
    report.check(f"{label}: no NaN", not any(nans))
    report.figures.setdefault("modes", {})[label] = {
        "formats": full["formats"],
        "tokens": sum(map(len, plain["tokens"])),
        "units_lent": elastic["units_lent"],
        "nans": nans,
    }
    say(f"{label}: formats {full['formats']}, {elastic['units_lent']} units lent")
