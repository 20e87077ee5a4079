"""The CPU: torch's GEMM, vLLM's packed kernels called as plain vLLM calls them, memory reads."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import dps_kernels
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import X86CPUUnquantizedExperts
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from dps_ray.bench.kernels.rounds import Contender
from dps_ray.bench.kernels.shapes import Shape
from dps_ray.bench.kernels.subject import TORCH, VLLM, Job
from dps_ray.engine.stock_gemm import is_plain_torch


class CpuDevice:
    """This machine's cores, as many as torch uses."""

    type = "cpu"

    def figures(self) -> dict[str, Any]:
        return {"isa": dps_kernels.isa(), "threads": torch.get_num_threads()}

    def synchronize(self) -> None:
        return

    def lacks(self, shape: Shape) -> str | None:
        return None

    def linears(self, weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
        """Stock kernels for one copy of a weight; vLLM's only where that is not torch itself."""
        kernels: dict[str, Callable[[Tensor], Tensor]] = {
            TORCH: partial(linear, weight=weight.clone())
        }
        layer = SimpleNamespace(weight=Parameter(weight.clone(), requires_grad=False))
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        if not is_plain_torch(layer.cpu_linear):
            kernels[VLLM] = lambda x: layer.cpu_linear(x, layer.weight, None)
        return kernels

    def experts(self, w13: Tensor, w2: Tensor) -> dict[str, Callable[..., Tensor]]:
        return {VLLM: PackedExperts(w13, w2)}

    def read(self, memory: Tensor) -> None:
        dps_kernels.read_all(memory)

    def rotating(self, calls: Sequence[Callable[[], object]]) -> Contender:
        return Contender(lambda i: calls[i](), len(calls))

    def peak(self, dtype: torch.dtype) -> Job | None:
        """None: the rows themselves hold stock GEMMs of every size."""
        return None


class PackedExperts:
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
