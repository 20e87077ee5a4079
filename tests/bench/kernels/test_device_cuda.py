"""The CUDA device without one: its calls fit the signatures of vLLM's kernels."""

from typing import Any
from unittest import mock

import pytest
import torch
import vllm.model_executor.layers.fused_moe.fused_moe as stock_experts
from vllm import _custom_ops

from dps_ray.bench.kernels import device_cuda
from dps_ray.bench.kernels.device_cuda import CudaDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A device whose operators have vLLM's signatures and compute nothing."""
    ops = mock.create_autospec(_custom_ops)
    ops.cutlass_scaled_mm_supports_fp8.return_value = True
    ops.scaled_fp8_quant.return_value = (mock.sentinel.codes, mock.sentinel.scales)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(device_cuda, "_vllm_ops", lambda: ops)
    return CudaDevice()


def test_fp8_gemm_is_called_as_vllm_defines_it(device: CudaDevice) -> None:
    weight, x = torch.randn(32, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    kernels = device.linears(weight)
    kernels["vllm fp8"](x)
    ops: Any = device._ops
    ops.cutlass_scaled_mm_supports_fp8.assert_called_once_with(90)
    codes, transposed, scales, scale, dtype = ops.cutlass_scaled_mm.call_args.args
    assert (codes, scales, dtype) == (mock.sentinel.codes, mock.sentinel.scales, x.dtype)
    back = transposed.t().float() * scale
    torch.testing.assert_close(back, weight.float(), rtol=2**-4, atol=2e-2)
    assert transposed.stride(0) == 1, "vLLM takes the second operand in columns"


def test_stock_experts_are_called_as_vllm_defines_them(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_experts = mock.create_autospec(stock_experts.fused_experts)
    monkeypatch.setattr(stock_experts, "fused_experts", fused_experts)
    w13, w2 = torch.randn(4, 64, 32).bfloat16(), torch.randn(4, 32, 32).bfloat16()
    x, weights = torch.randn(3, 32).bfloat16(), torch.rand(3, 2)
    ids = torch.tensor([[0, 1], [2, 3], [1, 3]], dtype=torch.int32)
    kernels = device.experts(w13, w2)
    for name in ("vllm", "vllm fp8"):
        kernels[name](x, weights=weights, ids=ids)
    plain, fp8 = fused_experts.call_args_list
    assert torch.equal(plain.args[1], w13)
    assert plain.kwargs["quant_config"] is None
    config = fp8.kwargs["quant_config"]
    assert config.use_fp8_w8a8
    assert config.w1_scale.shape == config.w2_scale.shape == (4,), "one scale an expert"
    assert fp8.args[1].dtype == torch.float8_e4m3fn
