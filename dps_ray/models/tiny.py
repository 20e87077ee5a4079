"""Tiny seeded models of the supported architectures, made in seconds for tests and checks."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dps_ray.config import DpsConfigError
from dps_ray.models import architectures
from dps_ray.models.architectures import Parameter, Role
from dps_ray.models.cache import building
from dps_ray.models.tokenizer import write_tokenizer
from dps_ray.models.weights import Outliers, draw

RECIPE = 1
"""Part of the folder name: raise it when the files made change, so that no stale one is used."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 64}


@dataclass(frozen=True)
class TinySpec:
    """Recipe of one tiny model."""

    architecture: str
    """Class name in ``config.json``, as in the real checkpoint."""
    model_type: str
    parameters: Callable[[dict[str, Any]], Iterator[Parameter]]
    settings: dict[str, Any]
    """``config.json`` entries that differ from the common ones."""
    outliers: Outliers

    @property
    def config(self) -> dict[str, Any]:
        return {
            **COMMON,
            **self.settings,
            "architectures": [self.architecture],
            "model_type": self.model_type,
        }


TINY: dict[str, TinySpec] = {
    "qwen3": TinySpec(
        "Qwen3ForCausalLM",
        "qwen3",
        architectures.qwen3,
        {**GROUPED, "intermediate_size": 768, "attention_bias": False},
        Outliers(rows=("1.self_attn.o_proj.weight",), spots=("2.mlp.down_proj.weight",)),
    ),
    "qwen3-moe": TinySpec(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        architectures.qwen3_moe,
        {
            **GROUPED,
            "intermediate_size": 768,
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
        },
        Outliers(
            rows=("1.self_attn.o_proj.weight", "1.mlp.experts.3.up_proj.weight"),
            spots=("2.mlp.experts.5.down_proj.weight",),
        ),
    ),
    "phimoe": TinySpec(
        "PhiMoEForCausalLM",
        "phimoe",
        architectures.phimoe,
        {
            **GROUPED,
            "intermediate_size": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
        Outliers(
            rows=("1.self_attn.o_proj.weight", "1.block_sparse_moe.experts.3.w3.weight"),
            spots=("2.block_sparse_moe.experts.5.w2.weight",),
        ),
    ),
    "glm4-moe-lite": TinySpec(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        architectures.glm4_moe_lite,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 128,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "intermediate_size": 768,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
            "attention_bias": False,
        },
        Outliers(
            rows=("1.self_attn.o_proj.weight", "1.mlp.experts.3.up_proj.weight"),
            spots=("2.mlp.experts.5.down_proj.weight", "2.self_attn.kv_b_proj.weight"),
        ),
    ),
}


def make_tiny(name: str, root: Path, *, dtype: str = "float16", seed: int = 0) -> Path:
    """Make a tiny model folder under ``root``, or find it there.

    Parameters
    ----------
    name
        A key of ``TINY``.
    root
        Folder that holds the models, created when missing.
    dtype
        ``float16`` or ``bfloat16``; both hold the same numbers, rounded.
    seed
        Seed of the weights.

    Returns
    -------
    Path
        A Hugging Face model folder: configuration, safetensors and tokenizer.

    Raises
    ------
    DpsConfigError
        The name or the dtype is not known.
    """
    if name not in TINY:
        raise DpsConfigError(f"tiny model is {name!r}: choose one of {', '.join(TINY)}")
    if dtype not in DTYPES:
        raise DpsConfigError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")
    target = Path(root) / f"tiny-{name}-{dtype}-seed{seed}-r{RECIPE}"
    if not target.is_dir():
        with building(target) as folder:
            _write(folder, TINY[name], dtype, seed)
    return target


def _write(folder: Path, spec: TinySpec, dtype: str, seed: int) -> None:
    config = spec.config
    tensors = {
        # The router's correction bias is float32 in the real checkpoint too.
        parameter.name: draw(parameter, spec.outliers, seed).to(
            torch.float32 if parameter.role is Role.ROUTER_BIAS else DTYPES[dtype]
        )
        for parameter in spec.parameters(config)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}, indent=1))
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=1))
    write_tokenizer(
        folder, vocab_size=config["vocab_size"], max_length=config["max_position_embeddings"]
    )
