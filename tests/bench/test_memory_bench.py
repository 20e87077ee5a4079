"""The memory benchmark measures what it says; its targets are for a quiet machine."""

import time
from pathlib import Path

import numpy as np
import pytest

from dps_ray.bench import memory
from dps_ray.bench.memory import bench_memory
from dps_ray.bench.memory_load import RESTORING, WINDOWS, LoadSamples, inflation
from dps_ray.bench.memory_return import IDLE, LIGHT, NO_DWELL, OURS, PAPER, figures, judge
from dps_ray.bench.memory_rig import memory_rig, ratio
from dps_ray.bench.paper_rule import PAPER_CHUNK_S, ThrottledPacer
from dps_ray.commands import StepCommand
from dps_ray.config import DpsConfigError
from dps_ray.memory.driver import Fence
from dps_ray.report import Report


def test_every_part_is_measured_and_the_switch_calls_no_driver() -> None:
    said: list[str] = []
    report = bench_memory(units=2, unit_mib=1, rounds=1, load_rounds=2, say=said.append)
    assert {"switch", "restore", "under_load"} <= report.figures.keys()
    assert report.checks["the switch to fast makes no driver call"]
    assert len(said) == 9


@pytest.mark.parametrize("name", ["units", "unit_mib", "rounds", "load_rounds"])
def test_nothing_to_measure_is_refused_with_the_remedy(name: str) -> None:
    sizes = {"units": 1, "unit_mib": 1, "rounds": 1, "load_rounds": 1, name: 0}
    with pytest.raises(DpsConfigError, match="give 1 or more"):
        bench_memory(**sizes, say=lambda text: None)


def test_the_paper_rule_takes_its_time_for_the_bytes_of_a_chunk() -> None:
    with memory_rig(
        unit_bytes=4 << 20, units=4, binding="fixed", pacer=ThrottledPacer(),
        chunk_bytes=1 << 20, verify=True,
    ) as rig:  # fmt: skip
        # The last chunk is waited for by nobody.
        assert rig.restore_all() >= 15 / 16 * 4 * PAPER_CHUNK_S


def test_a_slow_or_calling_switch_fails() -> None:
    report = Report("switch")
    with memory_rig(
        unit_bytes=1 << 20, units=2, binding="fixed", pacer=ThrottledPacer(),
        chunk_bytes=1 << 20, verify=True,
    ) as rig:  # fmt: skip
        apply = rig.manager.apply

        def slowly(command: StepCommand, fence: Fence) -> None:
            time.sleep(2e-3)
            rig.driver.calls += 1
            apply(command, fence)

        rig.manager.apply = slowly  # type: ignore[method-assign]
        memory._switch(report, rig, 1, lambda text: None)
    assert set(report.checks.values()) == {False}


def test_a_slow_restore_fails() -> None:
    report = Report("restore")
    taken = {name: [0.1, 0.1] for name in ("memcpy", "unverified", "any", "paper")}
    memory._restore(report, 1 << 20, taken | {"fixed": [0.13, 0.13]}, lambda text: None)
    assert set(report.checks.values()) == {False}
    report = Report("restore")
    taken["paper"] = [0.2, 0.2]
    memory._restore(report, 1 << 20, taken | {"fixed": [0.12, 0.12]}, lambda text: None)
    assert report.ok


@pytest.mark.parametrize(("stretch", "ok"), [(1.2, False), (1.01, True)])
def test_steps_that_a_restore_stretches_too_much_fail(
    monkeypatch: pytest.MonkeyPatch, stretch: float, ok: bool
) -> None:
    rng = np.random.default_rng(1)
    periods = {name: [list(rng.normal(5e-3, 1e-5, 50)) for _ in range(9)] for name in WINDOWS}
    periods[RESTORING] = [[stretch * period for period in one] for one in periods[RESTORING]]
    samples = LoadSamples(periods, copied_bytes=1, copied_s=1.0, disturbed=[False] * 9)
    monkeypatch.setattr(memory, "measure_load", lambda rig, rounds: samples)
    report = Report("load")
    memory._under_load(report, None, 9, lambda text: None)  # type: ignore[arg-type]
    assert report.ok is ok


def test_compaction_that_shortens_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"steps": 300, "fast_steps": 300, "fast_seconds": 1.0, "blocks_moved": 0}
    monkeypatch.setattr(memory, "long_request_specs", lambda folder: [])
    monkeypatch.setattr(memory, "make_tiny", lambda name, root: root)
    monkeypatch.setattr(memory, "run_engines", lambda specs: [run, run])
    report = Report("compaction")
    memory.bench_compaction(report, Path(), lambda text: None)
    assert not report.ok


@pytest.mark.parametrize(
    ("ours_s", "waits_s", "ok"), [(0.02, 0.5, True), (0.5, 0.5, False), (0.02, 60.0, True)]
)
def test_a_return_without_dwell_that_is_slower_than_the_papers_fails(
    ours_s: float, waits_s: float, ok: bool
) -> None:
    times_s = {OURS: waits_s, NO_DWELL: ours_s, PAPER: 0.1}
    turns = {
        name: [
            {"return_s": each, "units_lent": 9, "steps_ms": [], "steady_ms": [], "returned": True}
        ]
        * 3
        for name, each in times_s.items()
    }
    found = figures(turns)
    assert found["paper_over"][OURS]["median"] == 0.1 / waits_s
    report = Report("return")
    judge(report, {IDLE: found, LIGHT: found})
    assert report.ok is ok


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])["median"] == 2.0


def test_inflation_and_its_interval_find_what_is_there_and_nothing_else() -> None:
    rng = np.random.default_rng(1)
    alone, control, slower = ([list(rng.normal(5e-3, 1e-4, 50)) for _ in range(30)] for _ in "abc")
    slower = [[1.1 * period for period in window] for window in slower]
    for percentile in ("p50", "p99"):
        found, noise = inflation(slower, alone)[percentile], inflation(control, alone)[percentile]
        assert 0.0 < found["low"] < 0.1 < found["high"] < 0.15
        assert noise["low"] < 0.0 < noise["high"] < 0.05
