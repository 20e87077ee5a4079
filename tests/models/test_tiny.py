"""The tiny models carry the names, statistics and tokenizers that the checks rely on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dps_ray.config import DpsConfigError
from dps_ray.models.cache import building
from dps_ray.models.tiny import TINY, make_tiny

E4M3_LIMIT = 1.8125
"""Largest magnitude that e4m3 rounds to nearest, not saturates."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def linear_weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and name.startswith("model.layers") and ".gate.weight" not in name
    }


def row_shift_is_exact(weight: torch.Tensor) -> bool:
    """Whether one power of two per row brings its largest value to (0.875, 1.75] without a loss."""
    largest = weight.double().abs().amax(dim=1, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(1.75 / largest)))
    scaled = weight.double() * scale
    return bool((scaled.half().double() == scaled).all())


@pytest.mark.parametrize("name", TINY)
def test_float16_layers_need_each_of_the_three_nested_formats(name: str, root: Path) -> None:
    needs = {"e4m3": 0, "e4m3_row": 0, "e5m2": 0}
    for weight in linear_weights(make_tiny(name, root)).values():
        if weight.abs().max() <= E4M3_LIMIT:
            needs["e4m3"] += 1
        elif row_shift_is_exact(weight):
            needs["e4m3_row"] += 1
        else:
            needs["e5m2"] += 1
    assert needs["e4m3"] > needs["e4m3_row"] + needs["e5m2"]
    assert needs["e4m3_row"] >= 1
    assert needs["e5m2"] >= 1


@pytest.mark.parametrize("name", TINY)
def test_outliers_reach_from_2_to_100_and_stay_in_few_layers(name: str, root: Path) -> None:
    peaks = [float(weight.abs().max()) for weight in linear_weights(make_tiny(name, root)).values()]
    outliers = [peak for peak in peaks if peak > E4M3_LIMIT]
    assert all(2.0 < peak < 100.0 for peak in outliers)
    assert len(outliers) <= 4


@pytest.mark.parametrize("name", TINY)
def test_every_linear_dimension_splits_over_two_ranks_in_multiples_of_32(
    name: str, root: Path
) -> None:
    for weight in linear_weights(make_tiny(name, root)).values():
        assert all(size % 64 == 0 for size in weight.shape)


def test_same_seed_gives_same_weights_and_another_seed_gives_others(tmp_path: Path) -> None:
    first = load_file(make_tiny("qwen3", tmp_path / "a") / "model.safetensors")
    again = load_file(make_tiny("qwen3", tmp_path / "b") / "model.safetensors")
    other = load_file(make_tiny("qwen3", tmp_path / "a", seed=1) / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_bfloat16_variant_is_the_float32_draw_rounded_once(tmp_path: Path) -> None:
    half = load_file(make_tiny("qwen3", tmp_path) / "model.safetensors")
    brain = load_file(make_tiny("qwen3", tmp_path, dtype="bfloat16") / "model.safetensors")
    assert {tensor.dtype for tensor in brain.values()} == {torch.bfloat16}
    for name, tensor in half.items():
        torch.testing.assert_close(brain[name].float(), tensor.float(), rtol=2**-8, atol=1e-6)


def test_second_call_returns_the_folder_without_writing_it_again(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_tiny("qwen3", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_tokenizer_covers_the_vocabulary_and_returns_any_text(root: Path) -> None:
    folder = make_tiny("qwen3", root)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    text = "Ünïcode, emoji 🙂 and\ttabs — the server answers."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def build_half(target: Path) -> None:
    with building(target) as folder:
        (folder / "half").write_text("written")
        raise RuntimeError("interrupted")


def test_failed_build_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        build_half(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_folder_finished_by_another_process_first_is_kept(tmp_path: Path) -> None:
    with building(tmp_path / "model") as folder:
        (folder / "owner").write_text("late")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "owner").write_text("first")
    assert (tmp_path / "model" / "owner").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [("gpt2", "float16", "tiny model is 'gpt2'"), ("qwen3", "int8", "dtype is 'int8'")],
)
def test_unknown_name_or_dtype_is_refused_with_the_choices(
    name: str, dtype: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DpsConfigError, match=message):
        make_tiny(name, tmp_path, dtype=dtype)
