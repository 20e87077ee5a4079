"""Fused mixture-of-experts layers in two bytes per weight (CUDA).

vLLM routes (its modular interface hands over weights and ids of the chosen experts), runs shared
experts and reduces over ranks; what this method replaces is the routed experts' arithmetic. It
runs inside vLLM's opaque ``moe_forward``, so the mode is read at run time, or at capture.
"""

from typing import Any

import dps_kernels
import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    backend_to_kernel_cls,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from dps_ray.engine.split_weight import (
    SplitWeight,
    can_fuse_experts,
    encode_weight,
    place,
    place_fused,
    refuse_capture,
)


def mixtures_of(model: torch.nn.Module) -> set[tuple[int, int]]:
    """Number of experts and top-k of each layer of experts that runs in the kernels."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return {
        (method.moe.num_local_experts, method.moe.experts_per_token)
        for method in methods
        if isinstance(method, DpsCudaMoEMethod) and method.fused
    }


class DpsCudaMoEMethod(UnquantizedFusedMoEMethod):
    """Routed experts in two bytes: by the fused kernels, or rebuilt for vLLM's Triton kernel."""

    def __init__(self, moe: FusedMoEConfig, prefix: str) -> None:
        super().__init__(moe)
        # The one stock kernel that leaves routing to vLLM and weights in the checkpoint's order.
        self.unquantized_backend = UnquantizedMoeBackend.TRITON
        self.experts_cls = backend_to_kernel_cls(UnquantizedMoeBackend.TRITON)[0]
        self.prefix = prefix
        self.w13: SplitWeight | None = None
        self.w2: SplitWeight | None = None
        self.fused = False

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """Shared experts stay with vLLM's runner."""
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        encoded = {
            name: encode_weight(f"{self.prefix}.{name}", getattr(layer, f"{name}_weight").data)
            for name in ("w13", "w2")
        }
        self.fused = can_fuse_experts(layer.activation, self.moe, encoded.values())
        if not self.fused and any(encoded.values()):
            refuse_capture(self.prefix, "experts without SiLU gate, with bias or kept whole")
        for name, weight in encoded.items():
            if weight is not None:
                split = place_fused(weight) if self.fused else place(weight)
                setattr(self, name, split)
                getattr(layer, f"{name}_weight").data = weight.original.new_empty(0)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        if not self.fused:
            return self.moe_kernel.apply(
                hidden_states=x,
                w1=self._whole(self.w13, layer.w13_weight, "w13"),
                w2=self._whole(self.w2, layer.w2_weight, "w2"),
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )
        assert self.w13 is not None
        assert self.w2 is not None
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return dps_kernels.moe(x, self.w13.planes(), self.w2.planes(), topk_weights, topk_ids)

    @staticmethod
    def _whole(split: SplitWeight | None, weight: torch.Tensor, slot: str) -> torch.Tensor:
        return weight if split is None else split.rebuild_experts(None, slot)
