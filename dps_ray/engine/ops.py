"""The operations torch.compile sees in place of split layers.

For linear layers in the fused kernels that is the kernels' own, ``dps_kernels::elastic_linear``.
All are opaque on purpose: whether a residual may be read is asked when they run, by its address,
so that one compiled graph serves both precisions of every layer and a switch never recompiles. What
they read is either a tensor or constant for a mode, so that a CUDA graph captured in a mode replays
in that mode.
"""

import dps_kernels
import torch
from dps_kernels import ROW_MAJOR, Layout, Planes
from vllm.utils.torch_utils import direct_register_custom_op

from dps_ray.engine import rank as ranks
from dps_ray.engine.stock_gemm import stock_linear


def planes_now(
    upper: torch.Tensor,
    lower: torch.Tensor,
    fmt: str,
    row_shift: torch.Tensor | None,
    layout: Layout = ROW_MAJOR,
) -> Planes:
    """The bytes the running step may read: in a fast layer the lower ones may hold KV blocks."""
    readable = ranks.current().access.may_read(lower.data_ptr())
    return Planes(upper, lower if readable else None, fmt, row_shift, layout)


class FusedExperts:
    """A layer's split experts, both modes prepared once.

    Parameters
    ----------
    w13, w2
        Of full mode.
    dtype
        Of the activations.
    """

    def __init__(self, w13: Planes, w2: Planes, dtype: torch.dtype) -> None:
        assert w13.lower is not None
        assert w2.lower is not None
        self._addresses = [w13.lower.data_ptr(), w2.lower.data_ptr()]
        fast13, fast2 = (planes._replace(lower=None) for planes in (w13, w2))
        self._full = dps_kernels.prepare_moe(w13, w2, dtype)
        self._fast = dps_kernels.prepare_moe(fast13, fast2, dtype)

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        may_read = ranks.current().access.may_read
        full = all(may_read(address) for address in self._addresses)
        return (self._full if full else self._fast)(x, topk_weights, topk_ids)


def _dps_linear(
    x: torch.Tensor,
    upper: torch.Tensor,
    lower: torch.Tensor,
    row_shift: torch.Tensor | None,
    misfit_index: torch.Tensor | None,
    misfit_value: torch.Tensor | None,
    bias: torch.Tensor | None,
    fmt: str,
    layout: list[int],
) -> torch.Tensor:
    rows, interleave, k16 = layout
    order = Layout(rows, interleave, bool(k16))
    planes = planes_now(upper, lower, fmt, row_shift, order)
    weight = ranks.current().scratch(upper.shape, x.dtype)
    dps_kernels.reconstruct(weight, planes)
    if planes.lower is not None and misfit_index is not None and misfit_value is not None:
        weight.view(-1)[misfit_index] = misfit_value
    return stock_linear(x, weight, bias)


def _dps_linear_fake(
    x: torch.Tensor,
    upper: torch.Tensor,
    lower: torch.Tensor,
    row_shift: torch.Tensor | None,
    misfit_index: torch.Tensor | None,
    misfit_value: torch.Tensor | None,
    bias: torch.Tensor | None,
    fmt: str,
    layout: list[int],
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], upper.shape[0])


def _dps_experts(x: torch.Tensor, router_logits: torch.Tensor, name: str) -> torch.Tensor:
    return ranks.current().experts[name](x, router_logits)


def _dps_experts_fake(x: torch.Tensor, router_logits: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


def register_ops() -> None:
    """Define ``torch.ops.vllm.dps_linear`` and its sibling once a process."""
    if not hasattr(torch.ops.vllm, "dps_linear"):
        direct_register_custom_op("dps_linear", _dps_linear, fake_impl=_dps_linear_fake)
        direct_register_custom_op("dps_experts", _dps_experts, fake_impl=_dps_experts_fake)
