"""The CUDA expert method on a CPU: vLLM's modular path around it is real, its routing stands in.

vLLM's routing operation is compiled for GPUs only, so torch does it here; the kernels of
``dps_kernels`` serve both devices behind one call.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dps_ray.checks.mode_check import mode_specs
from dps_ray.checks.process import run_engines
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1300)]

AS_ON_CUDA = """
import torch
import vllm._custom_ops as ops

import dps_ray.engine.quantization as quantization


def topk_softmax(weights, ids, _, logits, renormalize=False, *__, **___):
    found, chosen = torch.softmax(logits.float(), -1).topk(ids.shape[1], -1)
    weights.copy_(found / found.sum(-1, keepdim=True) if renormalize else found)
    ids.copy_(chosen)


def moe_method(moe, prefix):
    from dps_ray.engine.moe_cuda import DpsCudaMoEMethod

    return DpsCudaMoEMethod(moe, prefix)


ops.topk_softmax = topk_softmax
quantization.moe_method = moe_method
"""


def test_cuda_experts_compute_what_cpu_experts_do_in_both_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, switching, _ = mode_specs("experts", make_tiny("qwen3-moe", cache_root()), 1)
    spec = replace(switching, dps={"lend": False})
    expected: dict[str, Any] = run_engines([spec])[0]
    # Python imports this module in every process it starts, before anything else.
    (tmp_path / "sitecustomize.py").write_text(AS_ON_CUDA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = run_engines([spec])[0]
    for mode in ("full", "fast", "full again"):
        assert found[mode]["tokens"] == expected[mode]["tokens"]
    assert found["full"]["logprobs"] != found["fast"]["logprobs"]
