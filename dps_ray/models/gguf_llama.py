"""Llama-architecture GGUF file to Hugging Face folder: 16-bit weights, configuration, tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dps_ray.config import DpsConfigError

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def convert(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write ``source`` as a Hugging Face model into the existing, empty ``folder``.

    Quantized tensors are dequantized in float32 and rounded once to ``dtype``.

    Raises
    ------
    DpsConfigError
        The file holds another architecture or tokenizer than this converter knows.
    """
    reader = GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for key, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if fields.get(key) != expected:
            raise DpsConfigError(
                f"{key} of {source.name} is {fields.get(key)!r}: only {expected!r} can be converted"
            )
    weights = dict(_weight(tensor, fields, dtype) for tensor in reader.tensors)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(fields, tied="lm_head.weight" not in weights, dtype=dtype)
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _write_tokenizer(folder, fields)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))


def _weight(
    tensor: ReaderTensor, fields: dict[str, Any], dtype: torch.dtype
) -> tuple[str, torch.Tensor]:
    *layer, kind, suffix = tensor.name.split(".")
    name = f"model.layers.{layer[1]}.{LAYER_NAMES[kind]}" if layer else GLOBAL_NAMES[kind]
    # GGUF lists dimensions innermost first.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    if kind == "attn_q":
        values = _unpermute_rope(values, fields["llama.attention.head_count"])
    elif kind == "attn_k":
        values = _unpermute_rope(values, fields["llama.attention.head_count_kv"])
    return f"{name}.{suffix}", torch.tensor(values).to(dtype)


def _unpermute_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder each head's rows from GGUF's interleaved rotary pairs to Hugging Face's two halves.

    ``weight`` is ``[heads * head_dim, in_features]``; row ``2 i + j`` of a head becomes row
    ``i + j * head_dim / 2``.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(fields: dict[str, Any], *, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32: 1e-5 reads back as 9.99999974e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    """Rebuild the byte-level BPE tokenizer; ``smollm`` pre-tokenizing splits digits one by one."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )
