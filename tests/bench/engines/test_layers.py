"""``bench layers``: its figures follow their definitions, and one run from end to end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dps_ray.bench.engines import layers
from dps_ray.bench.engines.layers import ALL, LAYER
from dps_ray.bench.engines.precision import divergence
from dps_ray.bench.engines.turns import EngineProcess
from dps_ray.checks.specs import EngineSpec
from dps_ray.cli.main import main
from dps_ray.models.tiny import make_tiny


def point(time_s: float, kl: float, full: bool = False, layers_full: int = 0) -> dict[str, Any]:
    return {"time_s": time_s, "kl": [kl, 3 * kl], "full": full, "layers_full": layers_full}


def turn(*points: dict[str, Any]) -> dict[str, Any]:
    return {
        "points": list(points),
        "return_s": next(one["time_s"] for one in points if one["full"]),
        "steps": sum(not one["full"] for one in points),
    }


def test_divergence_is_that_of_kullback_and_leibler_in_nats() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([[0.25, 0.75], [0.25, 0.75]])
    expected = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()
    assert divergence(p.log(), q.log()).tolist() == pytest.approx([float(expected), 0.0])


def test_each_step_counts_for_as_long_as_it_took_and_both_ways_up_to_the_later_return() -> None:
    slow = turn(
        point(1.0, 0.1), point(3.0, 0.1), point(4.0, 0.0, full=True), point(9.0, 0.5, full=True)
    )
    quick = turn(point(1.0, 0.1), point(2.0, 0.0, full=True), point(5.0, 0.05, full=True))
    figures = layers.figures({ALL: [slow], LAYER: [quick]})
    assert figures["exposure"][ALL]["median"] == pytest.approx(0.2 * 3.0)
    assert figures["exposure"][LAYER]["median"] == pytest.approx(0.2 * 1.0 + 0.1 * 2.0)
    assert figures["exposure_ratio"]["median"] == pytest.approx(0.4 / 0.6)
    assert figures["return_ratio"]["median"] == pytest.approx(0.5)
    assert figures["steps"] == {ALL: 2, LAYER: 1}
    assert "time to full mode: 0.50" in layers.time_table(figures)


@pytest.mark.engine
def test_residents_that_no_burst_disturbs_do_not_diverge(tmp_path: Path) -> None:
    base = EngineSpec("calm", str(make_tiny("qwen3", tmp_path)), 4 << 20, max_model_len=256)
    spec = layers.specs(base, "auto", 1e9)[LAYER]
    with EngineProcess(replace(spec, enable_prefix_caching=False), threads=1) as process:
        process.wait_until_ready()
        result = process.work(
            "way_back",
            residents=[[7] * 16, [9] * 16],
            fillers=[],
            filler_tokens=1,
            steps_after=40,
        )
    assert len(result["points"]) == 40
    assert max(value for one in result["points"] for value in one["kl"]) < 1e-4


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_bench_shows_layers_coming_back_one_by_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--model", "tiny:qwen3", "--root", str(tmp_path), "--threads", "1", "--rounds", "1"]
    small = ["--texts", "2", "--text-tokens", "16", "--choices", "2", "--residents", "2"]
    memory = ["--kv-mb", "4", "--restore-mb-per-s", "8", "--fillers", "8"]
    picture = tmp_path / "layers.png"
    main(["bench", "layers", *words, *small, *memory, "--plot", str(picture), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [row["layers"] for row in report["by_layers"]] == [0, 2, 4]
    none, half, everything = (row["kl"]["median"] for row in report["by_layers"])
    assert none > half > everything == 0.0
    ((ahead,), (together,)) = report["points"][LAYER], report["points"][ALL]
    counts = [one["layers_full"] for one in ahead]
    assert counts == sorted(counts)
    assert {*counts} - {0, 4}, "no step ran with some of the layers full"
    assert {one["layers_full"] for one in together} == {0}
    assert picture.read_bytes().startswith(b"\x89PNG")
