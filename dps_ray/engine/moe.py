"""Fused mixture-of-experts layers in two bytes per weight (CPU)."""

from functools import cache, partial
from typing import Any

import dps_kernels
import torch
from dps_kernels import ROW_MAJOR, Layout
from torch.nn.functional import pad
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from dps_ray.engine import rank as ranks
from dps_ray.engine.ops import FusedExperts
from dps_ray.engine.split_weight import (
    SplitWeight,
    can_fuse_experts,
    encode_weight,
    place,
    place_fused,
)

_CANDIDATE_LAYOUTS = tuple(
    Layout(rows, interleave) for interleave in (1, 2, 4) for rows in (8, 16, 32, 64)
)
_SHIFTLESS_FORMATS = ("e4m3", "e5m2")


class DpsMoEMethod(UnquantizedFusedMoEMethod):
    """Routed experts in two bytes: in the order of the fused kernels or in vLLM's own.

    The stock set-up runs first (padding, packing, routing configuration); the split bytes then
    replace its weights.
    """

    def __init__(self, moe: FusedMoEConfig, prefix: str) -> None:
        super().__init__(moe)
        self.prefix = prefix
        self.w13: SplitWeight | None = None
        self.w2: SplitWeight | None = None
        self.fused: FusedExperts | None = None
        self._plain_routing = False
        """The best logits and a softmax over them: most mixtures."""

    def process_weights_after_loading(self, layer: Any) -> None:
        rows = {"w13": layer.w13_weight.data, "w2": layer.w2_weight.data}
        super().process_weights_after_loading(layer)
        stock = self.moe_kernel.fused_experts
        self._plain_routing = (
            stock.renormalize
            and stock.scoring_func == "softmax"
            and not (stock.use_grouped_topk or stock.custom_routing_function)
        )
        isa = stock.isa
        rows = self._padded(rows)
        layouts = {name: _layout(isa, *weight.shape[1:]) for name, weight in rows.items()}
        encoded = {
            name: encode_weight(
                f"{self.prefix}.{name}", weight, self._formats(layouts[name] is not None)
            )
            for name, weight in rows.items()
        }
        fuse = can_fuse_experts(layer.activation, self.moe, encoded.values())
        for name, weight in encoded.items():
            if weight is None:
                continue
            if fuse:
                split = place_fused(weight)
            else:
                permute = partial(cpu_prepack_moe_weight, isa=isa)
                split = place(weight, permute, layouts[name] or ROW_MAJOR)
            setattr(self, name, split)
            getattr(layer, f"{name}_weight").data = torch.empty(0, dtype=split.dtype)
        if fuse:
            assert self.w13 is not None
            assert self.w2 is not None
            planes = self.w13.planes_full(), self.w2.planes_full()
            self.fused = FusedExperts(*planes, self.w13.dtype)
        ranks.current().experts[self.prefix] = partial(self.compute, layer)

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> Any:
        if not self.splits:
            return super().apply_monolithic(layer, x, router_logits, input_ids)
        # On CPU vLLM lets torch.compile trace into its experts.
        if not torch.compiler.is_compiling():
            return self.compute(layer, x, router_logits)
        return torch.ops.vllm.dps_experts(x, router_logits, self.prefix)

    @property
    def splits(self) -> bool:
        """Whether any of the layer's weights is split."""
        return self.w13 is not None or self.w2 is not None

    def compute(self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """Route tokens ``[T, K]`` by their logits ``[T, E]`` and run their experts, ``[T, K]``."""
        weights, ids = self._route(layer, x, router_logits)
        if self.fused is not None:
            if layer.apply_router_weight_on_input:
                x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
            return self.fused(x, weights, ids)
        experts = ids.unique().to(torch.int64)
        if layer.apply_router_weight_on_input:
            x = x.clone()  # the stock kernel scales it in place
        return self.moe_kernel.apply_monolithic(
            x,
            self._packed(self.w13, layer.w13_weight, experts, "w13"),
            self._packed(self.w2, layer.w2_weight, experts, "w2"),
            router_logits,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            num_expert_group=layer.num_expert_group,
            topk_group=layer.topk_group,
            e_score_correction_bias=layer.e_score_correction_bias,
            routed_scaling_factor=layer.routed_scaling_factor,
        )

    def _route(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's weights and experts, as the stock kernel finds them."""
        # The stock kernel routes by itself: what is rebuilt for it must be what it will choose.
        if self.fused is not None and self._plain_routing:
            return dps_kernels.route(router_logits, self.moe.experts_per_token)
        weights, ids = self.moe_kernel.fused_experts._select_experts(
            x,
            router_logits,
            layer.num_expert_group,
            layer.topk_group,
            layer.e_score_correction_bias,
            layer.routed_scaling_factor,
        )
        return weights, ids

    @staticmethod
    def _packed(
        split: SplitWeight | None, whole: torch.Tensor, experts: torch.Tensor, slot: str
    ) -> torch.Tensor:
        return whole if split is None else split.rebuild_experts(experts, slot)

    def _padded(self, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Zero-pad the intermediate dimension as the stock kernel's packing does."""
        size = self.moe.intermediate_size_per_partition
        extra = self.moe_kernel.fused_experts._padded_intermediate_size(self.moe) - size
        if not extra:
            return rows
        experts, _, hidden = rows["w13"].shape
        gate_up = pad(rows["w13"].view(experts, 2, size, hidden), (0, 0, 0, extra))
        return {
            "w13": gate_up.reshape(experts, 2 * (size + extra), hidden),
            "w2": pad(rows["w2"], (0, extra)),
        }

    def _formats(self, layout_known: bool) -> tuple[str, ...] | None:
        """A shift per row needs to know where the stock packing puts the rows."""
        if layout_known or ranks.current().fused:
            return None
        allowed = ranks.current().options.formats
        return tuple(fmt for fmt in allowed if fmt in _SHIFTLESS_FORMATS)


@cache
def _layout(isa: str, rows: int, columns: int) -> Layout | None:
    """How the stock kernel orders an expert's elements, read off by packing row numbers."""
    numbers = torch.arange(rows, dtype=torch.int16).unsqueeze(1).expand(rows, columns)
    packed = cpu_prepack_moe_weight(numbers.contiguous().view(torch.float16).unsqueeze(0), isa)
    found = packed.view(torch.int16).reshape(-1).to(torch.int64)
    position = torch.arange(rows * columns)
    for layout in _CANDIDATE_LAYOUTS:
        height, width, _ = layout
        if rows % height or columns % width:
            continue
        block, within = position // (height * columns), position % (height * width)
        if torch.equal(found, block * height + within // width):
            return layout
    return None
