"""Checkpoint parameters of the tiny models, under the names the real checkpoints use."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class Role(Enum):
    """What a parameter is, which decides how its values are drawn."""

    LINEAR = auto()
    EMBEDDING = auto()
    HEAD = auto()
    NORM = auto()
    BIAS = auto()
    ROUTER_BIAS = auto()


@dataclass(frozen=True)
class Parameter:
    """One tensor of a checkpoint; linear weights are ``[out_features, in_features]``."""

    name: str
    shape: tuple[int, ...]
    role: Role


def _linear(name: str, out_features: int, in_features: int) -> Parameter:
    return Parameter(f"{name}.weight", (out_features, in_features), Role.LINEAR)


def _norm(name: str, size: int) -> Parameter:
    return Parameter(f"{name}.weight", (size,), Role.NORM)


def _bias(name: str, size: int) -> Parameter:
    return Parameter(f"{name}.bias", (size,), Role.BIAS)


def _frame(config: dict[str, Any]) -> Iterator[Parameter]:
    """Tensors outside the decoder layers."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    yield Parameter("model.embed_tokens.weight", (vocab, hidden), Role.EMBEDDING)
    yield _norm("model.norm", hidden)
    yield Parameter("lm_head.weight", (vocab, hidden), Role.HEAD)


def _gated_mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Parameter]:
    yield _linear(f"{prefix}.gate_proj", intermediate, hidden)
    yield _linear(f"{prefix}.up_proj", intermediate, hidden)
    yield _linear(f"{prefix}.down_proj", hidden, intermediate)


def _grouped_attention(prefix: str, config: dict[str, Any]) -> Iterator[Parameter]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    yield _linear(f"{prefix}.q_proj", queries, hidden)
    yield _linear(f"{prefix}.k_proj", keys, hidden)
    yield _linear(f"{prefix}.v_proj", keys, hidden)
    yield _linear(f"{prefix}.o_proj", hidden, queries)


def _latent_attention(prefix: str, config: dict[str, Any]) -> Iterator[Parameter]:
    """Multi-head latent attention: one latent and one rotary key per token, shared by all heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    query_rank, latent_rank = config["q_lora_rank"], config["kv_lora_rank"]
    yield _linear(f"{prefix}.q_a_proj", query_rank, hidden)
    yield _norm(f"{prefix}.q_a_layernorm", query_rank)
    yield _linear(f"{prefix}.q_b_proj", heads * (nope + rope), query_rank)
    yield _linear(f"{prefix}.kv_a_proj_with_mqa", latent_rank + rope, hidden)
    yield _norm(f"{prefix}.kv_a_layernorm", latent_rank)
    yield _linear(f"{prefix}.kv_b_proj", heads * (nope + value), latent_rank)
    yield _linear(f"{prefix}.o_proj", hidden, heads * value)


def _layers(config: dict[str, Any]) -> Iterator[tuple[int, str]]:
    for index in range(config["num_hidden_layers"]):
        yield index, f"model.layers.{index}"


def _qwen3_attention(layer: str, config: dict[str, Any]) -> Iterator[Parameter]:
    yield _norm(f"{layer}.input_layernorm", config["hidden_size"])
    yield _norm(f"{layer}.post_attention_layernorm", config["hidden_size"])
    yield from _grouped_attention(f"{layer}.self_attn", config)
    yield _norm(f"{layer}.self_attn.q_norm", config["head_dim"])
    yield _norm(f"{layer}.self_attn.k_norm", config["head_dim"])


def qwen3(config: dict[str, Any]) -> Iterator[Parameter]:
    """``Qwen3ForCausalLM``."""
    yield from _frame(config)
    for _, layer in _layers(config):
        yield from _qwen3_attention(layer, config)
        yield from _gated_mlp(f"{layer}.mlp", config["hidden_size"], config["intermediate_size"])


def qwen3_moe(config: dict[str, Any]) -> Iterator[Parameter]:
    """``Qwen3MoeForCausalLM``."""
    hidden = config["hidden_size"]
    yield from _frame(config)
    for _, layer in _layers(config):
        yield from _qwen3_attention(layer, config)
        yield _linear(f"{layer}.mlp.gate", config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _gated_mlp(
                f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"]
            )


def phimoe(config: dict[str, Any]) -> Iterator[Parameter]:
    """``PhiMoEForCausalLM``: biases in norms and attention, experts ``w1``, ``w2``, ``w3``."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    yield from _frame(config)
    yield _bias("model.norm", hidden)
    yield _bias("lm_head", config["vocab_size"])
    for _, layer in _layers(config):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _norm(f"{layer}.{norm}", hidden)
            yield _bias(f"{layer}.{norm}", hidden)
        for weight in _grouped_attention(f"{layer}.self_attn", config):
            yield weight
            yield _bias(weight.name.removesuffix(".weight"), weight.shape[0])
        moe = f"{layer}.block_sparse_moe"
        yield _linear(f"{moe}.gate", config["num_local_experts"], hidden)
        for expert in range(config["num_local_experts"]):
            yield _linear(f"{moe}.experts.{expert}.w1", intermediate, hidden)
            yield _linear(f"{moe}.experts.{expert}.w2", hidden, intermediate)
            yield _linear(f"{moe}.experts.{expert}.w3", intermediate, hidden)


def glm4_moe_lite(config: dict[str, Any]) -> Iterator[Parameter]:
    """``Glm4MoeLiteForCausalLM``: latent attention, dense first layers, shared experts."""
    hidden, expert_size = config["hidden_size"], config["moe_intermediate_size"]
    yield from _frame(config)
    for index, layer in _layers(config):
        yield _norm(f"{layer}.input_layernorm", hidden)
        yield _norm(f"{layer}.post_attention_layernorm", hidden)
        yield from _latent_attention(f"{layer}.self_attn", config)
        if index < config["first_k_dense_replace"]:
            yield from _gated_mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        experts = config["n_routed_experts"]
        yield _linear(f"{layer}.mlp.gate", experts, hidden)
        yield Parameter(f"{layer}.mlp.gate.e_score_correction_bias", (experts,), Role.ROUTER_BIAS)
        yield from _gated_mlp(
            f"{layer}.mlp.shared_experts", hidden, expert_size * config["n_shared_experts"]
        )
        for expert in range(experts):
            yield from _gated_mlp(f"{layer}.mlp.experts.{expert}", hidden, expert_size)
