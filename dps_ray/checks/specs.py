"""What a check asks of an engine, as plain data that crosses a process boundary."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

AMPLE_KV_BYTES = 48 << 20
BLOCK_TOKENS = 32
MLA_BLOCK_TOKENS = 16
"""vLLM's CPU backend for latent attention knows this block size only."""
EXACT: dict[str, Any] = {"kernel": "exact", "min_fast_dwell_s": 0.0}

AUTO: dict[str, Any] = {**EXACT, "kernel": "auto"}
"""The default kernel, which does not promise the bits of plain vLLM."""

BY_LAYER: dict[str, Any] = {
    **EXACT,
    "return_by": "layer",
    "restore_chunk_bytes": 4096,
    "restore_max_inflation": 0.0,
    "restore_floor_bytes_per_s": 2e6,
}
"""Restores as slow as a large model's: several steps pass while a tiny one comes back, also where
steps are slow because the machine is busy."""


@dataclass(frozen=True)
class EngineSpec:
    """One vLLM engine to build, use and take down."""

    label: str
    model: str
    """Folder of the model."""
    kv_bytes: int
    """Base KV memory of one rank, bytes."""
    dps: dict[str, Any] | None = None
    """``additional_config["dps"]``; ``None`` for plain vLLM."""
    tensor_parallel_size: int = 1
    max_model_len: int = 1024
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    """Tokens of one step; ``None``: vLLM's default."""
    block_size: int = 32
    attention_backend: str | None = None
    """``None``: vLLM's choice."""
    enable_prefix_caching: bool = True
    compiled: bool = False
    """Run under torch.compile instead of eagerly."""
    engine_arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine."""
    scenario: str = "generate"
    """Name of a function in ``dps_ray.checks.scenarios``."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        return cls(**raw)


def latent(folder: Path) -> bool:
    """Whether a model has latent attention."""
    return "kv_lora_rank" in json.loads((folder / "config.json").read_text())


def block_bytes(folder: Path) -> int:
    """Bytes of one KV block of a tiny model over all layers."""
    config = json.loads((folder / "config.json").read_text())
    if latent(folder):
        per_block = MLA_BLOCK_TOKENS * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    else:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_block = BLOCK_TOKENS * 2 * config["num_key_value_heads"] * head
    return int(per_block * 2 * config["num_hidden_layers"])
