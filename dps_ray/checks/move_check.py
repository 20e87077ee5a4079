"""The part of ``check engine`` where memory moves under requests that go on."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dps_ray.checks.parts import Part, Results, Say
from dps_ray.checks.specs import AMPLE_KV_BYTES, BLOCK_TOKENS, EXACT, EngineSpec, block_bytes
from dps_ray.report import Report

LOAD_BASE_BLOCKS = 24
LONG_BASE_BLOCKS = 72
"""Room for one request of 1,000 tokens below the low watermark."""


def check_shadow(
    folder: Path,
    cycles: int,
    home: Path,
    options: Mapping[str, Any] = EXACT,
    ranks: int = 1,
) -> Part:
    """Full/fast cycles under load, then their shadow.

    Parameters
    ----------
    home
        Folder for what the shadow has to follow.
    ranks
        Tensor-parallel ranks.
    """
    by_layer = options.get("return_by") == "layer"
    what = "load" + (", layer by layer" if by_layer else "") + (f" tp={ranks}" if ranks > 1 else "")
    tape = str(home / f"{what}.json")
    spec = _spec(what, folder, LOAD_BASE_BLOCKS, dict(options))
    spec = replace(
        spec,
        kv_bytes=spec.kv_bytes // ranks,
        tensor_parallel_size=ranks,
        scenario="cycles_under_load",
        arguments={"count": cycles, "tape": tape},
    )
    static = replace(
        spec,
        label=f"{what}: shadow",
        kv_bytes=AMPLE_KV_BYTES,
        dps={**options, "lend": False},
        scenario="shadow",
        arguments={"tape": tape},
    )

    def judge(report: Report, say: Say, runs: Results) -> None:
        run, other = runs
        digests, steps = run.pop("digests"), run["steps"]
        report.check(
            f"{what}: {cycles} full/fast cycles equal a shadow on static memory, tokens and "
            "logprobs",
            digests == other["digests"],
        )
        report.check(f"{what}: {cycles} returns to full mode", run["switches_to_full"] >= cycles)
        report.check(f"{what}: live blocks were moved", run["blocks_moved"] > 0)
        report.check(
            f"{what}: steps ran alike", not run["preemptions"] and not other["preemptions"]
        )
        report.check(
            f"{what}: the restored residual equals the backup",
            all(rank["residual_intact"] for rank in run["ranks"]),
        )
        if by_layer:
            report.check(f"{what}: layers ran ahead", steps["fast with full layers"] > cycles)
        report.figures[what] = {**run, "requests": len(digests)}
        say(
            f"{what}: {run['cycles']} cycles, {len(digests)} requests, steps {steps}, "
            f"{run['units_lent']} units lent, {run['blocks_moved']} live blocks moved"
        )

    return Part([spec, static], judge)


def check_compaction(folder: Path) -> Part:
    """A long request in lent memory, with and without compaction."""

    def judge(report: Report, say: Say, runs: Results) -> None:
        moved, still = runs
        report.check(
            "compaction: full mode returns while the long request goes on",
            moved["blocks_moved"] > 0 and moved["fast_steps"] < moved["steps"],
        )
        report.check(
            "compaction: without it the long request holds the replica in fast mode",
            still["fast_steps"] == still["steps"],
        )
        report.figures["compaction"] = {"on": moved, "off": still}
        say(
            f"compaction: after the burst {moved['fast_steps']} of {moved['steps']} steps in fast "
            f"mode, without it {still['fast_steps']} of {still['steps']}"
        )

    return Part(long_request_specs(folder), judge)


def long_request_specs(folder: Path) -> list[EngineSpec]:
    """One long request that began in lent memory: compaction on, then off."""
    spec = _spec("long request", folder, LONG_BASE_BLOCKS, EXACT)
    spec = replace(spec, scenario="long_request")
    return [spec, replace(spec, dps={**EXACT, "compaction_blocks_per_step": 0})]


def _spec(label: str, folder: Path, base_blocks: int, dps: dict[str, Any]) -> EngineSpec:
    """Without a prefix cache: which prefixes survive depends on what was restored when."""
    return EngineSpec(
        label=label,
        model=str(folder),
        kv_bytes=base_blocks * block_bytes(folder),
        max_model_len=2048,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=False,
        dps=dps,
    )
