"""The default kernel where no other test has it: with biases, on two ranks, in a mixture."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dps_ray.checks.fused_check import FUSED_BOUND, fused_distances, fused_spec
from dps_ray.checks.mode_check import mode_specs, static_fast_spec
from dps_ray.checks.process import engine_environment, run_engines
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TIE = 0.02
"""Logits of two experts this close may change places when sums are rounded otherwise."""


def with_biases(folder: Path, target: Path) -> Path:
    """The tiny qwen3 with biases on queries, keys and values, as qwen2 has them."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in list(tensors.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias = torch.randn(len(weight), generator=generator) * 0.5
            tensors[name.replace(".weight", ".bias")] = bias.to(weight.dtype)
    for file in folder.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    return target


def test_model_with_biases_stays_near_the_exact_kernel_on_one_rank_and_on_two(
    tmp_path: Path,
) -> None:
    folder = with_biases(make_tiny("qwen3", cache_root(), dtype="bfloat16"), tmp_path)
    plain_spec, switching, _ = mode_specs("biases", folder, 1)
    fused = fused_spec(switching)
    plain, fast, one = run_engines([plain_spec, static_fast_spec("biases", plain_spec), fused])
    (two,) = run_engines([replace(fused, tensor_parallel_size=2)])
    for runs in (one, two):
        distances = fused_distances(runs, plain, fast)
        assert max(distances.values()) <= FUSED_BOUND, distances
        assert runs["full again"]["logprobs"] == runs["full"]["logprobs"]
        assert runs["full"]["logprobs"] != runs["fast"]["logprobs"]


def test_mixture_in_bfloat16_differs_by_more_than_the_bound_only_behind_a_tie_of_experts(
    tmp_path: Path,
) -> None:
    """Each text is compared up to the first token for which the engines chose other experts."""
    answer = tmp_path / "answer.json"
    subprocess.run(
        [sys.executable, "-m", "tests.engine.routed", str(answer)],
        env={**engine_environment(threads=1), "TORCHDYNAMO_DISABLE": "1"},
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=800,
    )
    found = json.loads(answer.read_text())
    assert found["compared"] > 400
    assert found["distance"] <= FUSED_BOUND
    assert all(gap <= TIE for gap in found["gaps"]), found
    assert found["usual_gap"] > 5 * TIE
