"""The memory benchmark measures what it says; its targets are for a quiet machine."""

import numpy as np

from dps_ray.bench.memory import bench_memory
from dps_ray.bench.memory_load import inflation
from dps_ray.bench.memory_rig import ThrottledPacer, memory_rig, ratio


def test_every_part_is_measured_and_the_switch_calls_no_driver() -> None:
    said: list[str] = []
    report = bench_memory(units=2, unit_mib=1, rounds=1, load_rounds=2, say=said.append)
    assert {"switch", "restore", "under_load"} <= report.figures.keys()
    assert report.checks["the switch to fast makes no driver call"]
    assert len(said) == 8


def test_the_paper_rule_takes_its_time_for_each_chunk() -> None:
    with memory_rig(
        unit_bytes=1 << 20, units=4, binding="fixed", pacer=ThrottledPacer(),
        chunk_bytes=1 << 18, verify=True,
    ) as rig:  # fmt: skip
        assert rig.restore_all() >= 15 * 3.3e-3


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
