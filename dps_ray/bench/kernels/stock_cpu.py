"""vLLM's own CPU kernels, called as plain vLLM calls them."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import X86CPUUnquantizedExperts
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from dps_ray.engine.stock_gemm import is_plain_torch
from dps_ray.engine.vllm_version import require_supported_vllm

require_supported_vllm()


def prepacked_linear(weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """vLLM's choice for a 16-bit weight ``[N, K]``; ``None`` where that is torch itself."""
    layer = SimpleNamespace(weight=Parameter(weight.clone(), requires_grad=False))
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    if is_plain_torch(layer.cpu_linear):
        return None
    return lambda x: layer.cpu_linear(x, layer.weight, None)


class PrepackedExperts:
    """vLLM's fused experts on packed ``[E, 2I, H]`` and ``[E, H, I]`` weights."""

    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        amx = X86CPUUnquantizedExperts._supports_current_device() and w13.dtype == torch.bfloat16
        self.isa = "amx" if amx else "vec"
        self._w13 = cpu_prepack_moe_weight(w13, self.isa)
        self._w2 = cpu_prepack_moe_weight(w2, self.isa)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return cpu_fused_moe(
            x, self._w13, self._w2, None, None, weights, ids, "silu", self.isa, False
        )
