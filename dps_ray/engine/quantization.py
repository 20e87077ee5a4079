"""``--quantization dps``: which layers are split, and how a split linear layer computes."""

from typing import Any

import dps_kernels
import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform

from dps_ray.engine import rank as ranks
from dps_ray.engine.kept_whole import reason_to_keep
from dps_ray.engine.ops import register_ops
from dps_ray.engine.split_weight import encode_weight, place, place_fused, report_whole
from dps_ray.engine.stock_gemm import is_plain_torch


class DpsConfig(QuantizationConfig):
    """Quantization configuration of an elastic engine; the options travel in additional_config."""

    def get_name(self) -> str:
        return "dps"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the checkpoint is an ordinary 16-bit one."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DpsConfig":
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return DpsLinearMethod(prefix)
        if isinstance(layer, RoutedExperts):
            return moe_method(layer.moe_config, prefix)
        if isinstance(layer, ParallelLMHead):
            return DpsHeadMethod()
        return None


class DpsLinearMethod(UnquantizedLinearMethod):
    """A linear layer in two bytes: created as a 16-bit one, split once its weight is loaded."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data
        whole = reason_to_keep(self.prefix)
        if whole is not None:
            report_whole(self.prefix, weight, whole)
            encoded = None
        else:
            encoded = encode_weight(self.prefix, weight)
        layer.dps_fmt = None if encoded is None else str(encoded.nested.fmt)
        if encoded is None:
            super().process_weights_after_loading(layer)
            return
        split_weight = place_fused(encoded) if ranks.current().fused else place(encoded)
        layer.weight = Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        layer.dps_upper = Parameter(split_weight.upper, requires_grad=False)
        layer.dps_lower = Parameter(split_weight.lower, requires_grad=False)
        layer.register_buffer("dps_row_shift", split_weight.row_shift, persistent=False)
        layer.dps_layout = [int(field) for field in split_weight.layout]
        layer.dps_fused = None
        if ranks.current().fused:
            layer.dps_fused = dps_kernels.prepare_elastic_linear(
                split_weight.planes_full(), split_weight.dtype, ranks.current().access
            )
        misfits = split_weight.misfits
        for name in ("index", "value"):
            tensor = None if misfits is None else getattr(misfits, name)
            layer.register_buffer(f"dps_misfit_{name}", tensor, persistent=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.dps_fmt is None:
            return super().apply(layer, x, bias)
        if layer.dps_fused is not None:
            if torch.compiler.is_compiling():
                return torch.ops.dps_kernels.elastic_linear(x, layer.dps_lower, bias)
            return layer.dps_fused(x, bias)
        return torch.ops.vllm.dps_linear(
            x,
            layer.dps_upper,
            layer.dps_lower,
            layer.dps_row_shift,
            layer.dps_misfit_index,
            layer.dps_misfit_value,
            bias,
            layer.dps_fmt,
            layer.dps_layout,
        )


class DpsHeadMethod(UnquantizedEmbeddingMethod):
    """The output head stays 16-bit; with fused CPU kernels its GEMM runs in float32 blocks.

    Where vLLM has no packed GEMM for it, the stock head takes longer than all other layers.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.dps_blocked = (
            ranks.current().fused and layer.weight.is_cpu and is_plain_torch(layer.cpu_linear)
        )

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.dps_blocked:
            return dps_kernels.linear_16bit(x, layer.weight, bias)
        return super().apply(layer, x, bias)


def moe_method(moe: FusedMoEConfig, prefix: str) -> QuantizeMethodBase:
    """How experts are split and computed on this platform."""
    if current_platform.is_cpu():
        from dps_ray.engine.moe import DpsMoEMethod

        return DpsMoEMethod(moe, prefix)
    from dps_ray.engine.moe_cuda import DpsCudaMoEMethod

    return DpsCudaMoEMethod(moe, prefix)


def register_quantization() -> None:
    """Make ``dps`` known to vLLM and define its operation."""
    register_quantization_config("dps")(DpsConfig)
    register_ops()
