"""What a checkpoint on disk says about its weights, read from the headers: nothing is loaded."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:\d+\.)?(\w+?)(?:\.weight)?$")
_EXPERTS_OUT = ("down_proj", "w2")
# vLLM stacks these projections into one layer, and a layer is split as a whole.
_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}
_ATTENTION_KEYS = ("k_proj", "qkv_proj", "kv_a_proj_with_mqa")
_REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")
_PER_KV_HEAD = ("k_proj", "v_proj")


@dataclass(frozen=True)
class Weight:
    """One matrix ``[N, K]``, or experts ``[E, N, K]``, of a decoder layer."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it: ``F16``, ``BF16``, ``F32``, ``F8_E4M3``, ..."""

    @property
    def layer(self) -> int:
        """Index of the decoder layer."""
        found = _LAYER.search(self.name)
        assert found is not None
        return int(found[1])

    @property
    def module(self) -> str:
        """Last part of the name: ``q_proj``, ``w2``, ..."""
        return self.name.removesuffix(".weight").rpartition(".")[2]

    @property
    def home(self) -> str:
        """Name of the vLLM layer that holds this matrix, with others stacked beside it."""
        expert = _EXPERT.search(self.name)
        if expert is not None:
            slot = "w2" if expert[1] in _EXPERTS_OUT else "w13"
            return f"{self.name[: expert.start()]}.experts.{slot}"
        parent = self.name.removesuffix(".weight").rpartition(".")[0]
        return f"{parent}.{_STACKED.get(self.module, self.module)}"

    def elements_per_rank(self, ranks: int, kv_heads: int) -> int:
        """Elements that one of ``ranks`` tensor-parallel ranks holds."""
        shards = ranks
        if self.module in _REPLICATED:
            shards = 1
        elif self.module in _PER_KV_HEAD:
            shards = min(ranks, kv_heads)
        numel = torch.Size(self.shape).numel()
        return -(-numel // shards)

    def load(self, dtype: torch.dtype) -> torch.Tensor:
        """Read the values, cast as vLLM casts them when it serves ``dtype``."""
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.name).to(dtype)


@dataclass(frozen=True)
class Checkpoint:
    """A model folder: its configuration and the matrices of its decoder layers."""

    folder: Path
    config: dict[str, Any]
    """``config.json``, or the language model's part of it."""
    quantization: dict[str, Any] | None
    """``quantization_config``: present when the checkpoint is no 16-bit one."""
    multimodal: bool
    weights: tuple[Weight, ...]
    """Empty when the folder holds no safetensors."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read ``config.json`` and the safetensors headers of ``folder``."""
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config", config)
        depth = text.get("num_hidden_layers")
        weights = tuple(
            weight
            for weight in _weights(folder)
            # Deeper layers are draft layers for multi-token prediction: the model does not load
            # them.
            if depth is None or weight.layer < depth
        )
        return cls(
            folder=folder,
            config=text,
            quantization=config.get("quantization_config") or text.get("quantization_config"),
            multimodal="vision_config" in config or "audio_config" in config,
            weights=weights,
        )

    @property
    def uniform_attention(self) -> bool:
        """Whether every decoder layer holds keys for every token, in blocks of one size."""
        depth = self.config.get("num_hidden_layers")
        attending = {w.layer for w in self.weights if w.module in _ATTENTION_KEYS}
        kinds = set(self.config.get("layer_types") or ())
        return len(attending) == depth and len(kinds) <= 1

    @property
    def latent_attention(self) -> bool:
        """Multi-head latent attention: one latent a token, shared by all heads."""
        return self.config.get("kv_lora_rank") is not None

    @property
    def kv_heads(self) -> int:
        """Key heads of a layer; 1, so a copy on every rank, where the configuration is silent."""
        config = self.config
        return int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 1)

    def kv_block_bytes(self, tokens: int, ranks: int, element_bytes: int) -> int:
        """KV block of ``tokens`` tokens over all layers of one rank, bytes."""
        config = self.config
        if self.latent_attention:
            per_token = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        else:
            head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            per_token = 2 * head * max(1, self.kv_heads // ranks)
        return int(tokens * per_token * element_bytes * config["num_hidden_layers"])


def _weights(folder: Path) -> Iterator[Weight]:
    for file, names in _files(folder).items():
        with safe_open(file, framework="pt") as reader:
            for name in names or reader.keys():
                if not _LAYER.search(name):
                    continue
                part = reader.get_slice(name)
                shape = tuple(part.get_shape())
                if len(shape) in (2, 3):
                    yield Weight(name, file, shape, part.get_dtype())


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Files to read and the tensors to take from each; ``None`` for all.

    With an index, only what it lists counts: some folders hold the same weights twice.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return dict.fromkeys(sorted(folder.glob("*.safetensors")))
    files: dict[Path, list[str] | None] = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        names = files.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    return files
