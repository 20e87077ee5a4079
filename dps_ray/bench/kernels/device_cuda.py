"""A CUDA device: cuBLAS, vLLM's FP8 GEMM and fused experts, memory and GEMM ceilings."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from dps_ray.bench.kernels.rounds import Contender
from dps_ray.bench.kernels.shapes import Moe, Shape
from dps_ray.bench.kernels.subject import FP8, PEAK, TORCH, VLLM, Job
from dps_ray.config import DpsConfigError

FP8_MAX = 448.0
PEAK_SIDE = 8192
"""Side of the square GEMM that gives the ceiling of arithmetic."""


class CudaDevice:
    """The current CUDA device.

    Raises
    ------
    DpsConfigError
        There is none.
    """

    type = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DpsConfigError("--device is cuda: torch sees no CUDA device, use --device cpu")
        self._ops = _vllm_ops()

    def figures(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties()
        return {"gpu": properties.name, "sm": f"{properties.major}.{properties.minor}"}

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def lacks(self, shape: Shape) -> str | None:
        if isinstance(shape, Moe) and self._ops is None:
            return f"{shape.name}: its stock kernels are vLLM's, whose CUDA build is not installed"
        return None

    def linears(self, weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
        """cuBLAS, and vLLM's FP8 GEMM where the device has one."""
        kernels: dict[str, Callable[[Tensor], Tensor]] = {
            TORCH: partial(linear, weight=weight.clone())
        }
        major, minor = torch.cuda.get_device_capability()
        if self._ops is not None and self._ops.cutlass_scaled_mm_supports_fp8(10 * major + minor):
            kernels[FP8] = partial(self._fp8_linear, *_to_fp8(weight))
        return kernels

    def experts(self, w13: Tensor, w2: Tensor) -> dict[str, Callable[..., Tensor]]:
        """vLLM's fused experts, in 16 bits and in FP8."""
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        def run(
            x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, config: Any
        ) -> Tensor:
            return fused_experts(x, w13, w2, weights, ids, quant_config=config)

        (code13, scale13), (code2, scale2) = (_to_fp8(each, by_expert=True) for each in (w13, w2))
        config = fp8_w8a8_moe_quant_config(w1_scale=scale13, w2_scale=scale2)
        return {
            VLLM: partial(run, w13=w13.clone(), w2=w2.clone(), config=None),
            FP8: partial(run, w13=code13, w2=code2, config=config),
        }

    def read(self, memory: Tensor) -> Tensor:
        return memory.sum()

    def rotating(self, calls: Sequence[Callable[[], object]]) -> Contender:
        """One captured graph goes round all copies: launching from Python would take longer."""
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return Contender(lambda _: graph.replay(), copies=1, kernels=len(calls))

    def peak(self, dtype: torch.dtype) -> Job | None:
        """A large square GEMM of cuBLAS."""
        a, b = (torch.randn(PEAK_SIDE, PEAK_SIDE, device="cuda").to(dtype) for _ in range(2))
        return Job({PEAK: self.rotating([lambda: a @ b])}, flops={PEAK: 2 * PEAK_SIDE**3})

    def _fp8_linear(self, weight: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        assert self._ops is not None
        codes, scales = self._ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        return self._ops.cutlass_scaled_mm(codes, weight.t(), scales, scale, x.dtype)


def _to_fp8(weight: Tensor, by_expert: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and one scale, or one a matrix of ``[E, N, K]``."""
    largest = weight.abs().amax(dim=(1, 2), keepdim=True) if by_expert else weight.abs().max()
    scale = largest.float() / FP8_MAX
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return codes, scale.reshape(-1)


def _vllm_ops() -> Any | None:
    """vLLM's operators where its CUDA build is installed."""
    try:
        from vllm import _custom_ops
        from vllm.platforms import current_platform
    except ImportError:
        return None
    return _custom_ops if current_platform.is_cuda() else None
