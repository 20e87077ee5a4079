"""The part of ``dps-ray bench memory`` on a live engine: full mode again after a burst."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from dps_ray.bench.engines.turns import EngineProcess, all_cores, engines, in_turns
from dps_ray.bench.kernels.rounds import ratio, spread
from dps_ray.bench.paper_rule import PAPER_LIMITS
from dps_ray.bench.prompts import token_id_prompts
from dps_ray.checks.specs import EngineSpec
from dps_ray.models.named import model_folder
from dps_ray.report import Report

OURS, NO_DWELL, PAPER = "ours", "ours without dwell", "the paper's rule"
ARMS: dict[str, dict[str, Any]] = {
    OURS: {},
    NO_DWELL: {"min_fast_dwell_s": 0.0},
    PAPER: PAPER_LIMITS,
}
IDLE, LIGHT = "idle", "light load"
RESIDENTS = {IDLE: 0, LIGHT: 1}


@dataclass(frozen=True)
class ReturnBench:
    """A burst of ``fillers`` prompts, cut off after it has decoded for a few steps."""

    model: str = "smollm2"
    dtype: str = "bfloat16"
    kv_bytes: int = 16_000_000
    fillers: int = 8
    filler_tokens: int = 400
    steps_decoding: int = 4
    rounds: int = 5
    seed: int = 0


def bench_return(
    report: Report, root: Path, bench: ReturnBench, say: Callable[[str], None]
) -> None:
    """Let engines that restore by our rule, without dwell, and by the paper's take turns."""
    base = EngineSpec(
        label="return",
        model=str(model_folder(bench.model, bench.dtype, root)),
        kv_bytes=bench.kv_bytes,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    specs = {name: replace(base, label=name, dps=options) for name, options in ARMS.items()}
    turns: dict[str, dict[str, list[dict[str, Any]]]] = {
        load: {name: [] for name in specs} for load in RESIDENTS
    }
    with engines(specs, all_cores()) as running:
        for load in RESIDENTS:
            for name, process in running.items():
                _turn(process, name, load, bench, -1)
            for number, name in in_turns(list(specs), bench.rounds):
                turns[load][name].append(_turn(running[name], name, load, bench, number))
    report.figures["return"] = found = {load: figures(each) for load, each in turns.items()}
    for load, each in found.items():
        report.check(f"full mode returns after every burst, {load}", each["returned"])
        report.check(f"every burst takes weight memory, {load}", each["lent"])
        for name in (OURS, NO_DWELL):
            say(line(load, name, each))
    judge(report, found)


def judge(report: Report, found: dict[str, dict[str, Any]]) -> None:
    """Our rule may wait before it copies; once it copies, it must not be slower."""
    report.check(
        "an idle replica that waits for no dwell is back sooner than by the paper's rule",
        found[IDLE]["paper_over"][NO_DWELL]["low"] > 1.0,
    )


def figures(turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Times, the paper's as multiples of ours, and what the way back did to the steps."""
    back_s = {name: [one["return_s"] for one in each] for name, each in turns.items()}
    return {
        "rounds": len(back_s[PAPER]),
        "return_s": {name: asdict(spread(each)) for name, each in back_s.items()},
        "paper_over": {
            name: asdict(ratio(back_s[PAPER], back_s[name])) for name in (OURS, NO_DWELL)
        },
        "units_lent": {name: median(one["units_lent"] for one in each)
                       for name, each in turns.items()},
        "lent": all(one["units_lent"] for each in turns.values() for one in each),
        "step_ms": {name: _median_ms(each, "steps_ms") for name, each in turns.items()},
        "steady_ms": {name: _median_ms(each, "steady_ms") for name, each in turns.items()},
        "returned": all(one["returned"] for each in turns.values() for one in each),
    }  # fmt: skip


def line(load: str, name: str, found: dict[str, Any]) -> str:
    """One comparison for people."""
    over, ours, paper = (
        found["paper_over"][name], found["return_s"][name], found["return_s"][PAPER],
    )  # fmt: skip
    steps, theirs = found["step_ms"][name], found["step_ms"][PAPER]
    text = (
        f"full mode after a burst, {load}, {name}: {ours['median']:.3f} s, the paper's rule "
        f"{paper['median']:.3f} s: {over['median']:.2f} times ours ({over['low']:.2f} to "
        f"{over['high']:.2f}, {found['rounds']} rounds)"
    )
    if steps is not None and theirs is not None:
        text += (
            f"; median step meanwhile {steps:.1f} ms, the paper's {theirs:.1f} ms, before the "
            f"burst {found['steady_ms'][name]:.1f} ms"
        )
    return text


def _median_ms(turns: list[dict[str, Any]], when: str) -> float | None:
    """Median step on the way back or before the burst; ``None`` on an idle replica."""
    steps = [step for one in turns for step in one[when]]
    return median(steps) if steps else None


def _turn(
    process: EngineProcess, name: str, load: str, bench: ReturnBench, number: int
) -> dict[str, Any]:
    prompt = token_id_prompts(seed=bench.seed + 1000 * (number + 2))
    count = RESIDENTS[load]
    return process.work(
        "burst_end",
        residents=[prompt(index, 64) for index in range(count)],
        fillers=[prompt(count + i, bench.filler_tokens) for i in range(bench.fillers)],
        steps_decoding=bench.steps_decoding,
        paper=name == PAPER,
    )
