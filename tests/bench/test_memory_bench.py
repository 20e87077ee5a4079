"""The memory benchmark measures what it says; its targets are for a quiet machine."""

from dps_ray.bench.memory import bench_memory
from dps_ray.bench.memory_rig import ThrottledPacer, memory_rig, ratio


def test_every_part_is_measured_and_the_switch_calls_no_driver() -> None:
    said: list[str] = []
    report = bench_memory(units=2, unit_mib=1, rounds=1, say=said.append)
    assert {"switch", "restore", "under_load"} <= report.figures.keys()
    assert report.checks["the switch to fast makes no driver call"]
    assert len(said) == 6


def test_the_paper_rule_takes_its_time_for_each_chunk() -> None:
    with memory_rig(
        unit_bytes=1 << 20, units=4, binding="fixed", pacer=ThrottledPacer(),
        chunk_bytes=1 << 18, verify=True,
    ) as rig:  # fmt: skip
        assert rig.restore_all() >= 15 * 3.3e-3


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])["median"] == 2.0
