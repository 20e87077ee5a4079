"""What a restore does to the steps beside it: windows with and without one in turns."""

import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dps_ray.bench.memory_rig import MemoryRig

STEP_SIZE = 768
"""Edge of the matrices that stand for a forward pass: a few milliseconds."""
WARM_STEPS, WINDOW_STEPS = 60, 50
UNCOUNTED_STEPS = 5
"""At the start of each window, after weight memory was written: the caches fill again."""
MOST_FOREIGN_CORES = 0.1
"""Rounds in which other processes take more than this share of a core tell about them."""
FEWEST_ROUNDS = 5
RESAMPLES = 2000
RESTORING, ALONE, CONTROL = "restoring", "alone", "control"
WINDOWS = (RESTORING, ALONE, CONTROL)
"""Both of the latter run without a restore: what they differ by is noise."""


@dataclass
class LoadSamples:
    """Periods of steps, seconds, by kind of window and by round; what was copied meanwhile."""

    periods_s: dict[str, list[list[float]]] = field(
        default_factory=lambda: {name: [] for name in WINDOWS}
    )
    copied_bytes: int = 0
    copied_s: float = 0.0
    disturbed: list[bool] = field(default_factory=list)
    """By round: other processes took too much of the machine."""

    @property
    def undisturbed(self) -> int:
        """Rounds that tell about us."""
        return self.disturbed.count(False)

    def kept(self, name: str) -> list[list[float]]:
        """Periods of the undisturbed rounds; of all, where too few are left for an interval."""
        rounds = self.periods_s[name]
        if self.undisturbed < FEWEST_ROUNDS:
            return rounds
        return [window for window, out in zip(rounds, self.disturbed, strict=True) if not out]


def measure_load(rig: MemoryRig, rounds: int) -> LoadSamples:
    """Run one window of each kind a round, in turning order, until enough were undisturbed or
    half as many again have run.

    A period is the forward pass and the end of its step: what the memory does between two steps
    counts. All windows begin alike, with all units lent and written.
    """
    left, right = torch.randn(STEP_SIZE, STEP_SIZE), torch.randn(STEP_SIZE, STEP_SIZE)
    samples = LoadSamples()

    def step() -> float:
        began_s = time.perf_counter()
        before = rig.manager.begin_step()
        pass_began_s = time.perf_counter()
        torch.mm(torch.mm(left, right), right)
        taken_s = time.perf_counter() - pass_began_s
        rig.manager.note_step(taken_s, load=1, copied_before=before)
        return time.perf_counter() - began_s

    for _ in range(WARM_STEPS):
        step()
    while samples.undisturbed < rounds and len(samples.disturbed) < 1.5 * rounds:
        number = len(samples.disturbed)
        watch = _ForeignWork()
        shift = number % len(WINDOWS)
        for name in WINDOWS[shift:] + WINDOWS[:shift]:
            rig.lend_all()
            if name == RESTORING:
                rig.order_restore()
            for _ in range(UNCOUNTED_STEPS):
                step()
            before, began_s = rig.manager.counters().bytes, time.perf_counter()
            window: list[float] = []
            while len(window) < WINDOW_STEPS:
                window.append(step())
                if name == RESTORING and rig.manager.wait_idle(0.0):
                    break
            samples.periods_s[name].append(window)
            if name == RESTORING:
                samples.copied_bytes += rig.manager.counters().bytes - before
                samples.copied_s += time.perf_counter() - began_s
            rig.manager.note_step(0.0, load=0, copied_before=0)
            rig.manager.wait_idle()
        samples.disturbed.append(watch.cores() > MOST_FOREIGN_CORES)
    return samples


class _ForeignWork:
    """Cores that other processes keep busy, from its creation on."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), _machine_busy_s(), time.process_time()

    def cores(self) -> float:
        wall_s, machine_s, own_s = (
            now - then
            for now, then in zip(
                (time.perf_counter(), _machine_busy_s(), time.process_time()),
                self._began,
                strict=True,
            )
        )
        return (machine_s - own_s) / wall_s


def _machine_busy_s() -> float:
    """CPU time that all processes together have used since boot, seconds."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _iowait, *interrupts = map(int, stat.readline().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def load_figures(samples: LoadSamples) -> dict[str, Any]:
    """Inflation at the median and at p99, and the same of the control, each with its interval."""
    periods = {name: samples.kept(name) for name in WINDOWS}
    return {
        "inflation": inflation(periods[RESTORING], periods[ALONE]),
        "control": inflation(periods[CONTROL], periods[ALONE]),
        "rounds": len(periods[ALONE]),
        "rounds_run": len(samples.disturbed),
        "rounds_undisturbed": samples.undisturbed,
        "steps": {name: sum(map(len, rounds)) for name, rounds in periods.items()},
        "step_ms": {
            name: float(np.median(np.concatenate(rounds))) * 1e3 for name, rounds in periods.items()
        },
        "gb_per_s": samples.copied_bytes / samples.copied_s / 1e9,
    }


def inflation(ours: list[list[float]], others: list[list[float]]) -> dict[str, dict[str, float]]:
    """How much longer our steps are at a percentile, with a 95% bootstrap interval over rounds.

    Whole rounds are drawn, both windows of each together: a neighbour's minutes on the machine
    are no independent steps.
    """
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(ours), size=len(ours)) for _ in range(RESAMPLES)]
    result = {}
    for percentile in (50, 99):
        resampled = [_ratio(ours, others, draw, percentile) for draw in draws]
        low, high = np.percentile(resampled, [2.5, 97.5])
        found = _ratio(ours, others, np.arange(len(ours)), percentile)
        result[f"p{percentile}"] = {"value": found, "low": float(low), "high": float(high)}
    return result


def _ratio(
    ours: list[list[float]], others: list[list[float]], draw: NDArray[np.intp], percentile: int
) -> float:
    upper, lower = (
        np.percentile(np.concatenate([rounds[index] for index in draw]), percentile)
        for rounds in (ours, others)
    )
    return float(upper / lower) - 1.0
