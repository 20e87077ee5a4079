"""The engine benchmarks' figures follow their definitions."""

import pytest

from dps_ray.bench.engines import pressure, speed
from dps_ray.bench.engines.pressure import PressureBench
from dps_ray.cli.main import main


def result(requests_per_s: float, **others: float) -> dict[str, float]:
    return {
        "requests_per_s": requests_per_s,
        "steps": 100,
        "fast_share": 0.0,
        "kv_peak_bytes": 59e6,
        "preemptions": 0,
        "returned": True,
        "settle_s": 0.5,
        **others,
    }


def test_dps_is_compared_with_both_others_round_by_round() -> None:
    figures = pressure.figures(
        {
            "plain": [result(1.0, preemptions=9), result(0.5)],
            "dps": [result(1.5, fast_share=0.8), result(0.75, kv_peak_bytes=165e6, fast_share=1.0)],
            "free memory": [result(1.5), result(0.75)],
        }
    )
    assert figures["dps_over"]["plain"]["median"] == pytest.approx(1.5)
    assert figures["dps_over"]["free memory"]["median"] == pytest.approx(1.0)
    assert figures["preemptions"] == {"plain": 4.5, "dps": 0, "free memory": 0}
    assert figures["kv_peak_mb"]["dps"] == pytest.approx(165)
    assert figures["fast_share"] == pytest.approx(0.9)
    text = pressure.table(figures)
    assert "1.500 (1.500-1.500)" in text
    assert "90% of the steps in fast mode" in text


def test_one_burst_that_never_came_back_to_full_mode_is_not_hidden_by_the_others() -> None:
    rounds = {"plain": [result(1.0)] * 2, "free memory": [result(1.0)] * 2}
    stuck = [result(1.0), result(1.0, returned=False)]
    assert not pressure.figures({**rounds, "dps": stuck})["returned"]


def test_every_engine_gets_the_same_burst_and_every_round_another() -> None:
    bench = PressureBench()
    assert bench.burst(3) == bench.burst(3)
    assert bench.burst(3) != bench.burst(4)
    burst = bench.burst(0)
    assert len(burst["prompts"]) == len(burst["outputs"]) == 40
    assert all(150 <= len(prompt) <= 500 for prompt in burst["prompts"])
    assert all(40 <= tokens <= 120 for tokens in burst["outputs"])


def test_decode_speed_is_a_ratio_to_plain_in_the_same_round() -> None:
    speeds = {"plain": [10.0, 20.0, 40.0], "full": [10.0, 20.0, 40.0], "fast": [20.0, 40.0, 80.0]}
    row = {"model": "smollm2 bfloat16", "batch": 8, **speed.figures(speeds)}
    assert row["speedup"]["full"]["median"] == pytest.approx(1.0)
    assert row["speedup"]["fast"]["low"] == pytest.approx(2.0)
    assert "2.000 (2.00-2.00)" in speed.line(row)


def test_a_batch_of_nobody_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--batch", "0"]) == 2
    assert "--batch is 0: give a whole number of at least 1" in capsys.readouterr().err
