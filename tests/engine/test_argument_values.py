"""Engine arguments checked without a model: what vLLM itself would give passes."""

import dataclasses
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs

from dps_ray.engine.argument_values import argument_faults


def test_every_default_of_vllm_passes() -> None:
    # Defaults that a factory makes are objects, which no configuration file gives.
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(AsyncEngineArgs)
        if field.default is not dataclasses.MISSING
    }
    assert len(defaults) > 150
    assert argument_faults(defaults, "engine_kwargs") == []


@pytest.mark.parametrize(
    "argument",
    [
        {"max_model_len": None},
        {"dtype": "bfloat16"},
        {"attention_backend": "flash_attn"},
        {"quantization": "dps"},
        {"compilation_config": {"cudagraph_mode": "NONE"}},
        {"hf_overrides": {"rope_theta": 1e6}},
        {"limit_mm_per_prompt": {"image": 2}},
        {"cpu_offload_params": ["experts"]},
        {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}},
        {"served_model_name": ["a", "b"]},
        {"logits_processors": ["package.module:Processor"]},
        {"gpu_memory_utilization": 1},
        {"tool_call_parser": "hermes"},
        {"attention_backend": "auto"},
        {"mamba_backend": "triton"},
        {"quantization": "FP8"},
        {"optimization_level": 0},
        {"dtype": torch.bfloat16},
        {"reasoning_parser": None},
        {"enable_lora": None},
        {"mm_processor_cache_gb": None},
        {"enable_auto_tool_choice": None},
        {"max_model_len": "4096"},
        {"gpu_memory_utilization": "0.9"},
        {"enforce_eager": "true"},
        {"max_model_len": -1, "max_num_seqs": 8, "max_num_batched_tokens": 512},
    ],
)
def test_value_that_vllm_takes_passes(argument: dict[str, Any]) -> None:
    assert argument_faults(argument, "engine_kwargs") == []
