"""The figures of ``dps-ray bench kernels`` follow their definitions, on real kernels too."""

import json
from typing import Any

import pytest
import torch

from dps_ray.bench.kernels.device_cpu import CpuDevice
from dps_ray.bench.kernels.measure import figures, scaling
from dps_ray.bench.kernels.shapes import SHAPES, TOKENS, Dense, Moe, find_shapes
from dps_ray.bench.kernels.subject import Job
from dps_ray.bench.kernels.subjects import make_subject
from dps_ray.bench.kernels.table import line
from dps_ray.bench.kernels.targets import verdicts
from dps_ray.cli.main import main
from dps_ray.config import DpsConfigError

TIMES = {
    "full": [2.0, 2.0, 2.0],
    "fast": [1.0, 1.0, 2.0],
    "torch": [3.0, 3.0, 3.0],
    "vllm": [2.0, 2.2, 2.4],
    "stream": [1.0, 1.0, 1.0],
}
KERNELS = ("full", "fast", "torch", "vllm")
READ = {"full": 200e9, "fast": 100e9, "torch": 200e9, "vllm": 200e9, "stream": 150e9}
FLOPS = dict.fromkeys(KERNELS, 10**12)


def test_speedup_is_taken_over_the_better_stock_kernel_in_the_same_round() -> None:
    got = figures(TIMES, Job({}, READ, FLOPS))
    assert got["rival"] == "vllm"
    assert got["speedup"]["full"] == pytest.approx({"median": 1.1, "low": 1.05, "high": 1.15})
    assert got["speedup"]["fast"]["median"] == pytest.approx(2.0)


def test_share_of_bandwidth_compares_bytes_that_must_be_read_with_the_stream_probe() -> None:
    share = figures(TIMES, Job({}, READ, FLOPS))["bandwidth_share"]
    assert share["full"]["median"] == pytest.approx(100 / 150)
    assert share["fast"]["median"] == pytest.approx(100 / 150)


def test_every_row_says_what_was_achieved_in_bytes_and_in_operations() -> None:
    got = figures(TIMES, Job({}, READ, FLOPS))
    times = {"full": 2.0, "fast": 1.0, "torch": 3.0, "vllm": 2.2}
    assert got["gbps"] == pytest.approx({name: READ[name] / 1e9 / times[name] for name in times})
    assert got["gflops"] == pytest.approx({name: 1e3 / times[name] for name in times})


def test_a_mixture_must_read_the_experts_that_its_tokens_are_routed_to() -> None:
    shape = Moe("small", experts=8, top_k=2, hidden=64, inner=32)
    subject = make_subject(CpuDevice(), shape, None, torch.bfloat16, 1000)
    one, many = subject.job(1), subject.job(64)
    assert one.read_bytes["full"] == 2 * one.read_bytes["fast"] == 2 * 2 * shape.expert_numel
    # 64 tokens reach every expert in nearly all of the routings.
    assert 0.99 < many.read_bytes["full"] / (2 * shape.numel) <= 1.0
    assert many.flops["full"] == 64 * one.flops["full"] == 64 * 2 * 2 * shape.expert_numel
    assert "stream" in many.contenders
    assert "stream" not in subject.job(65).contenders


def row_of(shape: str, tokens: int, full: float, fast: float, share: float = 0.9) -> dict[str, Any]:
    speedup = {"full": {"median": full}, "fast": {"median": fast}}
    shares = {"full": {"median": share}, "fast": {"median": share}}
    names = {"shape": shape, "format": "e4m3_row", "tokens": tokens, "threads": 1, "rival": "vllm"}
    return {**names, "speedup": speedup, "bandwidth_share": shares}


def test_missed_targets_of_named_layers_are_named_with_what_is_wanted() -> None:
    rows = [
        row_of("qwen3-8b.o", 1, 1.01, 1.79),
        row_of("qwen3-8b.o", 64, 0.86, 0.89),
        row_of("qwen3-30b-a3b.experts", 16, 0.94, 1.71),
        row_of("128x64", 1, 0.1, 0.1),
    ]
    missed = [label for label, held in verdicts(rows).items() if not held]
    assert missed == [
        "qwen3-8b.o e4m3_row M=1 threads=1: fast >= 1.8 x vllm (1.79)",
        "qwen3-8b.o e4m3_row M=64 threads=1: fast >= 0.9 x vllm (0.89)",
        "qwen3-30b-a3b.experts e4m3_row M=16 threads=1: full >= 0.95 x vllm (0.94)",
    ]


def test_one_token_must_be_near_the_bandwidth_of_a_plain_read() -> None:
    held = verdicts([row_of("smollm2.o", 1, 1.5, 2.5, share=0.84)])
    assert [label.split(": ")[1] for label, ok in held.items() if not ok] == [
        "full >= 0.85 of stream bandwidth (0.84)",
        "fast >= 0.85 of stream bandwidth (0.84)",
    ]


def test_every_default_row_has_targets_for_both_modes_or_for_full_experts() -> None:
    for shape in SHAPES:
        for tokens in TOKENS:
            got = " ".join(verdicts([row_of(shape.name, tokens, 1.0, 1.0)]))
            assert "full >= " in got
            assert "fast >= " in got or (isinstance(shape, Moe) and tokens > 16)


def test_rows_without_the_stream_probe_have_no_share() -> None:
    times = {name: values for name, values in TIMES.items() if name != "stream"}
    row = figures(times, Job({}, READ, FLOPS))
    assert "bandwidth_share" not in row
    text = line({**row, "shape": "o", "format": "e4m3", "tokens": 8})
    assert "vllm" in text
    assert "1.10 (1.05-1.15)" in text


def test_fp8_kernels_are_no_rival_of_full_mode_but_stand_beside_fast_mode() -> None:
    job = Job({}, {**READ, "vllm fp8": 100e9}, {**FLOPS, "vllm fp8": 10**12})
    got = figures({**TIMES, "vllm fp8": [1.5, 1.5, 1.5]}, job)
    assert got["rival"] == "vllm"
    assert got["fast_over_fp8"]["median"] == pytest.approx(1.5)


def test_rows_of_many_tokens_say_how_near_the_arithmetic_peak_they_come() -> None:
    times = {"full": [2.0] * 3, "fast": [1.0] * 3, "torch": [2.0] * 3, "peak": [4.0] * 3}
    got = figures(times, Job({}, READ, {**FLOPS, "peak": 8 * 10**12}))
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
    assert all(row["threads"] == torch.get_num_threads() for row in report["rows"])
    assert all(row["us"]["full"] > 0 and row["us"]["torch"] > 0 for row in report["rows"])


def test_two_numbers_of_threads_share_the_rounds_and_the_second_says_what_it_gained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--shapes", "96x64", "--tokens", "1", "--threads", "1", "2", "--max-rounds", "5"]
    before = torch.get_num_threads()
    assert main(["bench", "kernels", *words, "--working-set-gb", "0.001", "--json"]) == 0
    assert torch.get_num_threads() == before
    one, two = json.loads(capsys.readouterr().out)["rows"]
    assert (one["threads"], two["threads"]) == (1, 2)
    assert "scaling" not in one
    assert two["scaling"]["from"] == 1
    assert set(two["scaling"]["x"]) == {*two["us"], "stream"}


def test_scaling_is_the_speedup_by_the_other_number_of_threads() -> None:
    got = scaling({"full": [2.0, 4.0]}, {"full": [1.0, 2.0]})
    assert got == {"full": {"median": 2.0, "low": 2.0, "high": 2.0}}


@pytest.mark.parametrize("threads", [["0"], ["2", "2"]])
def test_threads_that_cannot_be_compared_are_refused(
    threads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", "--shapes", "96x64", "--threads", *threads]) == 2
    assert "--threads is" in capsys.readouterr().err
