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

from dps_ray.checks.features_check import check_features
from dps_ray.checks.floor_check import check_floors
from dps_ray.checks.fused_check import check_fused
from dps_ray.checks.layer_check import CHOSEN, check_layers
from dps_ray.checks.mode_check import check_modes
from dps_ray.checks.move_check import check_compaction, check_shadow
from dps_ray.checks.parts import Part, Results, Say, run_parts
from dps_ray.checks.prefix_check import check_prefixes
from dps_ray.checks.specs import (
    BLOCK_TOKENS,
    BY_LAYER,
    EXACT,
    EngineSpec,
    block_bytes,
)
from dps_ray.models.tiny import make_tiny
from dps_ray.report import Report

BURST_BASE_BLOCKS = 24
"""A third of what the burst's 12 requests of 6 blocks hold at once."""
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
            *(check_modes(label, folder, 1) for label, folder in subjects.items()),
            *(
                check_layers(subjects[f"{name} float16"], chosen, home)
                for name, chosen in CHOSEN.items()
                if name in models
            ),
            *(check_features(subjects["qwen3 float16"], home) if "qwen3" in models else ()),
            *(
                [check_fused("qwen3 float16", subjects["qwen3 float16"])]
                if "qwen3" in models
                else ()
            ),
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
        pairs = [check_modes(label, folder, 2) for label, folder in sharded.items()]
        if pairs:
            pairs.append(check_shadow(folder, load_cycles // 50 + 1, home, ranks=2))
            _judge(pairs, run_parts(pairs, TIMEOUT_S), report, say)
    return report


def _judge(parts: Sequence[Part], results: Sequence[Results], report: Report, say: Say) -> None:
    for part, found in zip(parts, results, strict=True):
        part.judge(report, say, found)


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
