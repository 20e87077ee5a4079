"""``dps-ray check engine``: elastic against static, bit for bit, on real engines.

Memory safety is proved by controls: a run whose memory moves must equal the run whose memory
does not, in the same mode, to the last bit of every logprob.
"""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dps_ray.checks.features_check import check_features
from dps_ray.checks.floor_check import check_floors
from dps_ray.checks.layer_check import CHOSEN, check_layers
from dps_ray.checks.move_check import check_compaction, check_shadow
from dps_ray.checks.parts import Part, Results, Say, run_parts
from dps_ray.checks.prefix_check import check_prefixes
from dps_ray.checks.requests import logprob_distance
from dps_ray.checks.specs import (
    AMPLE_KV_BYTES,
    AUTO,
    BLOCK_TOKENS,
    BY_LAYER,
    EXACT,
    EngineSpec,
    block_bytes,
    latent,
)
from dps_ray.models.tiny import make_tiny
from dps_ray.report import Report

SMALL_BASE_BLOCKS = 8
BURST_BASE_BLOCKS = 24
"""A third of what the burst's 12 requests of 6 blocks hold at once."""
FORCED_FAST: dict[str, Any] = {**EXACT, "pin": "fast"}
FUSED_BOUND = 0.25
"""Largest difference of a logprob that the default kernel's sums may make on the tiny qwen3.

Rounding can choose other experts of a tiny mixture, so mixtures have no such bound."""
SHARDED = ("qwen3", "qwen3-moe")
"""Models that are also checked with two tensor-parallel ranks."""
TIMEOUT_S = 7200.0


def check_engine(
    models: Sequence[str],
    root: Path,
    *,
    cycles: int,
    load_cycles: int,
    floor_requests: int,
    say: Callable[[str], None],
) -> Report:
    """Run every engine check on the named tiny models.

    Parameters
    ----------
    models
        Keys of ``TINY``.
    root
        Folder that holds (or receives) the models.
    cycles
        Forced switch cycles around resident requests.
    load_cycles
        Cycles by real pressure, compared with a shadow engine.
    floor_requests
        Requests over many bursts, a tenth of which insists on full precision.
    say
        Receives a line for each part, as groups of parts end.
    """
    report = Report("check engine")
    subjects = {
        f"{name} {dtype}": make_tiny(name, root, dtype=dtype)
        for name in models
        for dtype in (("float16", "bfloat16") if name == "qwen3" else ("float16",))
    }
    sharded = {
        f"{label} tp=2": folder
        for label, folder in subjects.items()
        if label.split()[0] in SHARDED and label.endswith("float16")
    }
    first = next(iter(subjects))
    folder = subjects[first]
    with tempfile.TemporaryDirectory(prefix="dps-check-") as scratch:
        home = Path(scratch)
        still = [
            *(_modes(label, folder, 1) for label, folder in subjects.items()),
            *(
                check_layers(subjects[f"{name} float16"], chosen, home)
                for name, chosen in CHOSEN.items()
                if name in models
            ),
            *(check_features(subjects["qwen3 float16"], home) if "qwen3" in models else ()),
            *([_fused("qwen3 float16", subjects["qwen3 float16"])] if "qwen3" in models else ()),
        ]
        moving = [
            _burst(first, folder),
            _cycles(first, folder, cycles),
            check_shadow(folder, load_cycles, home),
            check_compaction(folder),
            check_prefixes(folder),
            check_shadow(folder, load_cycles // 10 + 1, home, BY_LAYER),
            check_floors(folder, floor_requests),
        ]
        with ThreadPoolExecutor(max_workers=2) as pool:
            groups = [
                (parts, pool.submit(run_parts, parts, TIMEOUT_S)) for parts in (still, moving)
            ]
            for parts, results in groups:
                _judge(parts, results.result(), report, say)
        # Two ranks need both cores.
        pairs = [_modes(label, folder, 2) for label, folder in sharded.items()]
        if pairs:
            _judge(pairs, run_parts(pairs, TIMEOUT_S), report, say)
    return report


def _judge(parts: Sequence[Part], results: Sequence[Results], report: Report, say: Say) -> None:
    for part, found in zip(parts, results, strict=True):
        part.judge(report, say, found)


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


def fused_spec(switching: EngineSpec) -> EngineSpec:
    """The switching engine of ``mode_specs`` with the default kernel instead of the exact one."""
    label = switching.label.replace("switching", "default kernel")
    return replace(switching, label=label, dps={**AUTO, "lend": False})


def _modes(label: str, folder: Path, ranks: int) -> Part:
    return Part(mode_specs(label, folder, ranks), partial(_judge_modes, label))


def _fused(label: str, folder: Path) -> Part:
    plain, switching, fast = mode_specs(label, folder, 1)
    static = replace(
        fast,
        label=f"{label}: fast, static KV",
        kv_bytes=plain.kv_bytes,
        dps={**FORCED_FAST, "lend": False},
    )
    return Part([plain, static, fused_spec(switching)], partial(_judge_fused, label))


def _burst(label: str, folder: Path) -> Part:
    return Part(_burst_specs(label, folder), _judge_burst)


def _cycles(label: str, folder: Path, cycles: int) -> Part:
    return Part(_cycle_specs(label, folder, cycles), partial(_judge_cycles, cycles))


def _burst_specs(label: str, folder: Path) -> list[EngineSpec]:
    plain = EngineSpec(
        label=f"{label}: burst, plain",
        model=str(folder),
        kv_bytes=BURST_BASE_BLOCKS * block_bytes(folder),
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        scenario="burst",
        arguments={"count": 12, "prompt_tokens": 96, "max_tokens": 96},
    )
    return [plain, replace(plain, label=f"{label}: burst, dps", dps=EXACT)]


def _cycle_specs(label: str, folder: Path, cycles: int) -> list[EngineSpec]:
    return [
        EngineSpec(
            label=f"{label}: cycles",
            model=str(folder),
            kv_bytes=BURST_BASE_BLOCKS * block_bytes(folder),
            max_model_len=2048,
            block_size=BLOCK_TOKENS,
            dps=EXACT,
            scenario="cycles",
            arguments={"count": cycles},
        )
    ]


def _judge_modes(label: str, report: Report, say: Say, runs: Results) -> None:
    plain, switching, elastic = runs
    full, static, again = (switching[name] for name in ("full", "fast", "full again"))
    report.check(f"{label}: full mode equals plain vLLM, tokens and logprobs", _same(plain, full))
    report.check(f"{label}: full mode ran in full mode", full["status"]["tokens_fast"] == 0)
    report.check(f"{label}: full mode after fast mode equals it too", _same(plain, again))
    report.check(
        f"{label}: forced fast on elastic KV equals forced fast on static KV",
        _same(static, elastic),
    )
    report.check(f"{label}: forced fast ran in fast mode", elastic["status"]["tokens_full"] == 0)
    report.check(f"{label}: elastic KV used lent memory", elastic["units_lent"] > 0)
    report.check(f"{label}: fast mode is another precision", not _same(plain, static))
    nans = [run["nans"] for run in (plain, full, static, again, elastic)]
    report.check(f"{label}: no NaN", not any(nans))
    report.figures.setdefault("modes", {})[label] = {
        "formats": full["formats"],
        "tokens": sum(map(len, plain["tokens"])),
        "units_lent": elastic["units_lent"],
        "nans": nans,
    }
    say(f"{label}: formats {full['formats']}, {elastic['units_lent']} units lent")


def _judge_fused(label: str, report: Report, say: Say, runs: Results) -> None:
    plain, fast, fused = runs
    distances = fused_distances(fused, plain, fast)
    for mode, distance in distances.items():
        report.check(
            f"{label}: default kernel, {mode} mode: logprobs within {FUSED_BOUND} of the exact one",
            distance <= FUSED_BOUND,
        )
    report.check(
        f"{label}: default kernel, full mode after fast mode equals full mode",
        _same(fused["full"], fused["full again"]) and not _same(fused["full"], fused["fast"]),
    )
    report.figures["default kernel"] = {"model": label, "logprob_distance": distances}
    say(f"{label}: default kernel within {max(distances.values()):.3f} of the exact one's logprobs")


def _judge_burst(report: Report, say: Say, runs: Results) -> None:
    plain, elastic = runs
    report.check(
        "burst: fewer preemptions than plain vLLM at the same memory",
        elastic["preemptions"] < plain["preemptions"],
    )
    report.check("burst: the replica returned to full mode", elastic["returned_to_full"])
    report.check(
        "burst: the restored residual equals the backup",
        all(rank["residual_intact"] for rank in elastic["ranks"]),
    )
    report.check("burst: no NaN", not plain["nans"] and not elastic["nans"])
    report.figures["burst"] = {
        "requests": 12,
        "base_blocks": elastic["status"]["base_blocks"],
        "preemptions_plain": plain["preemptions"],
        "preemptions_dps": elastic["preemptions"],
        "switches_to_fast": elastic["status"]["switches_to_fast"],
        "restored_bytes": elastic["status"]["restored_bytes"],
    }
    say(f"burst: preemptions {plain['preemptions']} plain, {elastic['preemptions']} dps")


def _judge_cycles(cycles: int, report: Report, say: Say, runs: Results) -> None:
    (run,) = runs
    status = run["status"]
    report.check(
        f"cycles: {cycles} switches to fast and back", status["switches_to_full"] >= cycles
    )
    report.check("cycles: live KV contents never changed", run["corrupted_blocks"] == 0)
    report.check("cycles: blocks were watched in every cycle", run["blocks_watched"] >= cycles)
    report.check("cycles: every cycle lent memory", run["cycles_lending"] == cycles)
    report.check(
        "cycles: the restored residual equals the backup",
        all(rank["residual_intact"] for rank in run["ranks"]),
    )
    report.figures["cycles"] = run
    say(f"cycles: {status['switches_to_full']} returns, {run['blocks_watched']} blocks compared")


def fused_distances(
    fused: dict[str, Any], plain: dict[str, Any], fast: dict[str, Any]
) -> dict[str, float]:
    """How far the default kernel's logprobs are from plain vLLM's and the exact fast mode's."""
    return {
        "full": logprob_distance(fused["full"], plain),
        "fast": logprob_distance(fused["fast"], fast),
    }


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])
