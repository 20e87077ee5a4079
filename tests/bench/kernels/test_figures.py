"""The figures of ``dps-ray bench kernels`` follow their definitions, on real kernels too."""

import json

import pytest
import torch

from dps_ray.bench.kernels.measure import figures
from dps_ray.bench.kernels.shapes import SHAPES, Dense, find_shapes
from dps_ray.bench.kernels.subject import Job
from dps_ray.bench.kernels.table import line
from dps_ray.cli.main import main
from dps_ray.config import DpsConfigError

TIMES = {
    "full": [2.0, 2.0, 2.0],
    "fast": [1.0, 1.0, 2.0],
    "torch": [3.0, 3.0, 3.0],
    "vllm": [2.0, 2.2, 2.4],
    "stream": [1.0, 1.0, 1.0],
}
READ = {"full": 200, "fast": 100, "torch": 200, "vllm": 200, "stream": 150}


def test_speedup_is_taken_over_the_better_stock_kernel_in_the_same_round() -> None:
    got = figures(TIMES, Job({}, READ))
    assert got["rival"] == "vllm"
    assert got["speedup"]["full"] == pytest.approx({"median": 1.1, "low": 1.05, "high": 1.15})
    assert got["speedup"]["fast"]["median"] == pytest.approx(2.0)


def test_share_of_bandwidth_compares_bytes_that_must_be_read_with_the_stream_probe() -> None:
    share = figures(TIMES, Job({}, READ))["bandwidth_share"]
    assert share["full"]["median"] == pytest.approx(100 / 150)
    assert share["fast"]["median"] == pytest.approx(100 / 150)


def test_rows_without_the_stream_probe_have_no_share() -> None:
    times = {name: values for name, values in TIMES.items() if name != "stream"}
    row = figures(times, Job({}, {}))
    assert "bandwidth_share" not in row
    text = line({**row, "shape": "o", "format": "e4m3", "tokens": 8})
    assert "vllm" in text
    assert "1.10 (1.05-1.15)" in text


def test_fp8_kernels_are_no_rival_of_full_mode_but_stand_beside_fast_mode() -> None:
    got = figures({**TIMES, "vllm fp8": [1.5, 1.5, 1.5]}, Job({}, {**READ, "vllm fp8": 100}))
    assert got["rival"] == "vllm"
    assert got["fast_over_fp8"]["median"] == pytest.approx(1.5)


def test_rows_of_many_tokens_say_how_near_the_arithmetic_peak_they_come() -> None:
    times = {"full": [2.0] * 3, "fast": [1.0] * 3, "torch": [2.0] * 3, "peak": [4.0] * 3}
    flops = {"full": 10**12, "fast": 10**12, "torch": 10**12, "peak": 8 * 10**12}
    got = figures(times, Job({}, flops=flops))
    assert got["peak_tflops"]["median"] == pytest.approx(2.0)
    assert got["peak_share"]["full"]["median"] == pytest.approx(0.25)
    text = line({**got, "shape": "o", "format": "e4m3", "tokens": 1024})
    assert "25%, 50%, 25% of 2 TFLOP/s" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_machine_without_a_gpu_is_told_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device, use --device cpu" in capsys.readouterr().err


def test_a_model_names_all_of_its_layers_and_a_size_names_itself() -> None:
    assert find_shapes(["qwen3-8b"]) == [s for s in SHAPES if s.name.startswith("qwen3-8b.")]
    assert find_shapes(["128x64"]) == [Dense("128x64", 128, 64)]


@pytest.mark.parametrize("name", ["qwen9", "12x", "0x64", "12x-4", ""])
def test_an_unknown_shape_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(DpsConfigError, match=r"--shapes has .* smollm2\.qkv"):
        find_shapes([name])


def test_the_command_prints_one_json_object_with_every_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--shapes", "96x64", "--tokens", "1", "5", "--formats", "e4m3", "e5m2"]
    quick = ["--working-set-gb", "0.001", "--row-s", "0.01", "--max-rounds", "5"]
    assert main(["bench", "kernels", *words, *quick, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert [(row["format"], row["tokens"]) for row in report["rows"]] == [
        ("e4m3", 1),
        ("e4m3", 5),
        ("e5m2", 1),
        ("e5m2", 5),
    ]
    assert all(row["rounds"] == 5 for row in report["rows"])
    assert all(row["us"]["full"] > 0 and row["us"]["torch"] > 0 for row in report["rows"])
