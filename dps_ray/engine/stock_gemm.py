"""vLLM's own choice of GEMM for a 16-bit weight, asked for anew with a rebuilt weight.

The exact kernel option promises the bits of plain vLLM, so it must call what plain vLLM would
call on this CPU (oneDNN, its packed GEMM or torch) instead of guessing. On CUDA that is torch.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

_plain_torch: set[tuple[torch.dtype, torch.Size]] = set()
"""Weights for which vLLM falls back to torch, learned at first use."""


def stock_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` with the kernel plain vLLM picks for this dtype and shape."""
    key = (weight.dtype, weight.shape)
    if not weight.is_cpu or key in _plain_torch:
        return linear(x, weight, bias)
    layer = SimpleNamespace(weight=weight, bias=None if bias is None else _Data(bias.clone()))
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    if is_plain_torch(layer.cpu_linear):
        _plain_torch.add(key)
        return linear(x, weight, bias)
    return layer.cpu_linear(x, weight, bias if layer.bias is None else layer.bias.data)


def is_plain_torch(cpu_linear: Callable[..., torch.Tensor]) -> bool:
    """Whether the dispatcher found nothing better than torch for a weight.

    Its better choices close over a packed weight. On a CPU without native 16-bit arithmetic,
    torch's 16-bit GEMM is several times slower than its float32 one.
    """
    return cpu_linear.__closure__ is None


class _Data(SimpleNamespace):
    """A bias as the dispatcher sees one: it may replace ``data`` by a converted copy."""

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data=data)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return self.data.to(dtype)
