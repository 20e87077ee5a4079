"""``dps-ray bench memory``: what lending, restoring and moving memory costs on this machine."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool

from dps_ray.bench.memory_load import load_figures, measure_load
from dps_ray.bench.memory_rig import MemoryRig, in_turns, memory_rig, ratio
from dps_ray.bench.paper_rule import ThrottledPacer
from dps_ray.checks.move_check import long_request_specs
from dps_ray.checks.process import run_engines
from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.memory.host_driver import Reached
from dps_ray.memory.pacing import Pacer
from dps_ray.models.tiny import make_tiny
from dps_ray.report import Report
from dps_ray.scheduling.block_precision import BlockPrecision
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.policy import Pressure, SwitchLimits
from dps_ray.scheduling.sum_manager import SumManager

MIB = 1 << 20
LOAD_ROUNDS = 40
"""Rounds of windows of steps: enough for a percentile of 2,000 steps of each kind."""

Say = Callable[[str], None]


def bench_memory(
    *, units: int, unit_mib: int, rounds: int, load_rounds: int = LOAD_ROUNDS, say: Say
) -> Report:
    """Measure switch, restore and pacing; every comparison is a ratio of interleaved runs.

    Parameters
    ----------
    units, unit_mib
        Size of the residual.
    rounds
        Turns of each comparison.
    load_rounds
        Rounds of steps with and without a restore.
    say
        Receives a line as each part ends.
    """
    if min(units, unit_mib, rounds, load_rounds) < 1:
        raise DpsConfigError(
            f"units, unit-mib, rounds and load rounds are {units}, {unit_mib}, {rounds}, "
            f"{load_rounds}: give 1 or more"
        )
    report = Report("bench memory", {"units": units, "unit_mib": unit_mib})
    options = DpsOptions()
    shape = {
        "unit_bytes": unit_mib * MIB,
        "units": units,
        "chunk_bytes": options.restore_chunk_bytes,
    }

    def rig(binding: Any, pacer: Pacer, verify: bool = True) -> Any:
        return memory_rig(binding=binding, pacer=pacer, verify=verify, **shape)

    def default_pacer() -> Pacer:
        return Pacer(
            max_inflation=options.restore_max_inflation,
            floor_bytes_per_s=options.restore_floor_bytes_per_s,
        )

    with (
        rig("fixed", default_pacer()) as fixed,
        rig("fixed", default_pacer(), verify=False) as unverified,
        rig("any", default_pacer()) as moved,
        rig("fixed", ThrottledPacer()) as paper,
    ):
        _switch(report, fixed, rounds, say)
        taken = in_turns(
            rounds,
            memcpy=fixed.plain_copy,
            fixed=fixed.restore_all,
            unverified=unverified.restore_all,
            any=lambda: moved.restore_all(shift=1),
            paper=paper.restore_all,
        )
        _restore(report, fixed.residual_bytes, taken, say)
        _under_load(report, fixed, load_rounds, say)
    return report


def _switch(report: Report, rig: MemoryRig, rounds: int, say: Say) -> None:
    """Allocations that take lends, and the step's orders, beside one that takes none."""
    counts = sorted({1, min(4, len(rig.units)), len(rig.units)})
    calls = rig.driver.calls
    lends = {count: _lend(rig, count, max(rounds, 20)) for count in counts}
    unit_mib = rig.region.geometry.unit_bytes / MIB
    report.figures["switch"] = {
        "driver_calls": rig.driver.calls - calls,
        "unit_mib": unit_mib,
        "count": max(rounds, 20),
        "by_units_lent": lends,
    }
    added_ms = lends[1]["added_step_ms"]
    report.check("the switch to fast makes no driver call", rig.driver.calls == calls)
    report.check("the switch to fast adds less than 1 ms to a step", added_ms < 1.0)
    for count, lend in lends.items():
        say(
            f"switch to fast, {count} units of {unit_mib:.0f} MiB: {lend['scheduling_us']:.0f} us "
            f"of scheduling, {lend['zeroing_us']:.0f} us of zeroing "
            f"({lend['zeroing_ms_per_mib']:.3f} ms per MiB)"
        )


def _lend(rig: MemoryRig, units: int, rounds: int) -> dict[str, float]:
    """What it adds to a step that it lends ``units`` units; medians of ``rounds``."""
    geometry = rig.region.geometry
    lend_s: list[float] = []
    plain_s: list[float] = []
    zero_s: list[float] = []
    for _ in range(rounds):
        plain = BlockPool(geometry.num_blocks, enable_caching=True, hash_block_size=16)
        pool = ElasticBlockPool.make_elastic(plain, geometry.base_blocks, geometry.blocks_per_unit)
        pool.precision = BlockPrecision()
        pool.manager = manager = SumManager(
            UnitLedger(geometry.num_units, geometry.blocks_per_unit),
            SwitchLimits(1.0, 0.6, 0.0, 0.0), pool, clock=time.monotonic,
        )  # fmt: skip
        pool.get_new_blocks(pool.free_base_blocks - 1)
        for seconds, blocks in (
            (plain_s, 1), (lend_s, (units - 1) * geometry.blocks_per_unit + 1),
        ):  # fmt: skip
            began_s = time.perf_counter()
            pool.get_new_blocks(blocks)
            command = manager.plan_step(Pressure(pool.live_blocks, geometry.base_blocks))
            seconds.append(time.perf_counter() - began_s)
        # Weights that are about to be lent have left the caches since they were last read.
        rig.restore_all()
        began_s = time.perf_counter()
        rig.manager.apply(command, Reached())
        zero_s.append(time.perf_counter() - began_s)
    rig.restore_all()
    scheduling_s = float(np.median(np.array(lend_s) - np.array(plain_s)))
    zeroing_s = float(np.median(zero_s))
    return {
        "scheduling_us": scheduling_s * 1e6,
        "zeroing_us": zeroing_s * 1e6,
        "zeroing_ms_per_mib": zeroing_s * 1e3 / (units * geometry.unit_bytes / MIB),
        "added_step_ms": (scheduling_s + zeroing_s) * 1e3,
    }


def _restore(report: Report, nbytes: int, taken: dict[str, list[float]], say: Say) -> None:
    share = ratio(taken["memcpy"], taken["fixed"])
    figures = {
        "share_of_memcpy": share,
        "share_of_memcpy_unverified": ratio(taken["memcpy"], taken["unverified"]),
        "any_over_fixed": ratio(taken["any"], taken["fixed"]),
        "paper_rule_over_ours": ratio(taken["paper"], taken["fixed"]),
        "gb_per_s": {name: nbytes / float(np.median(s)) / 1e9 for name, s in taken.items()},
    }
    report.figures["restore"] = figures
    report.check("an idle restore reaches 80% of memcpy", share["median"] >= 0.8)
    report.check(
        "an idle restore of everything is quicker than the paper's throttled chunks",
        figures["paper_rule_over_ours"]["median"] > 1.0,
    )
    for name in ("share_of_memcpy", "share_of_memcpy_unverified", "any_over_fixed",
                 "paper_rule_over_ours"):  # fmt: skip
        say(f"restore: {name.replace('_', ' ')} {_text(figures[name])}")


def _under_load(report: Report, rig: MemoryRig, rounds: int, say: Say) -> None:
    figures = load_figures(measure_load(rig, rounds))
    report.figures["under_load"] = figures
    report.check(
        "p99 of step times grows by at most 5% during a restore",
        figures["inflation"]["p99"]["value"] <= 0.05,
    )
    for name, text in (
        ("inflation", f"under load: restoring at {figures['gb_per_s']:.2f} GB/s, step time"),
        ("control", "under load: control without a restore, step time"),
    ):
        say(f"{text} {_interval(figures[name]['p50'])} median, "
            f"{_interval(figures[name]['p99'])} p99 "
            f"({figures['steps']['restoring']} steps)")  # fmt: skip
    say(f"under load: {figures['rounds_undisturbed']} of {figures['rounds_run']} rounds without "
        f"other processes' work, {figures['rounds']} counted")  # fmt: skip


def bench_compaction(report: Report, root: Path, say: Say) -> None:
    """One request of 1,000 tokens in lent memory on a real engine, with and without compaction."""
    on, off = run_engines(long_request_specs(make_tiny("qwen3", root)))
    report.figures["compaction"] = {
        name: {
            "steps": run["steps"],
            "fast_steps": run["fast_steps"],
            "fast_seconds": run["fast_seconds"],
            "blocks_moved": run["blocks_moved"],
        }
        for name, run in (("on", on), ("off", off))
    }
    report.check("compaction shortens the stay in fast mode", on["fast_steps"] < off["fast_steps"])
    say(
        f"one long request after a burst: {on['fast_steps']} of {on['steps']} steps in fast mode "
        f"with compaction ({on['blocks_moved']} blocks moved), {off['fast_steps']} of "
        f"{off['steps']} without"
    )


def _interval(figure: dict[str, float]) -> str:
    return f"{figure['value']:+.1%} ({figure['low']:+.1%} to {figure['high']:+.1%})"


def _text(figure: dict[str, float]) -> str:
    return (
        f"{figure['median']:.2f} ({figure['q25']:.2f} to {figure['q75']:.2f}, "
        f"{figure['count']} rounds)"
    )
