"""Rebuilding 16-bit weights, for layers whose GEMM stays the framework's own."""

import torch
from torch import Tensor

from dps_kernels import fallback
from dps_kernels.library import native, runs_compiled
from dps_kernels.planes import HALVES, Planes, check_layout, check_planes, check_tensor


def reconstruct(out: Tensor, planes: Planes, experts: Tensor | None = None) -> None:
    """Write the weight's 16-bit values into ``out``, in the order of ``planes.layout``.

    Parameters
    ----------
    out
        Shape of ``planes.upper``, float16 or bfloat16 (rounded to nearest even), contiguous.
    planes
        [N, K] or [E, N, K]; without ``lower`` the fast-mode values are written.
    experts
        int64 numbers of the matrices of [E, N, K] to write, or ``None`` for all.

    Raises
    ------
    ValueError, TypeError
        Names the argument whose shape, dtype or value does not fit.
    """
    check_planes(planes, (2, 3))
    upper, lower, fmt, row_shift, layout = planes
    check_tensor("out", out, upper.shape, HALVES)
    rows_per_block, interleave, _ = check_layout(layout, *upper.shape[-2:])
    if experts is not None:
        _check_experts(experts, upper)
    if runs_compiled(upper):
        native().reconstruct(
            out, upper, lower, fmt == "e5m2", row_shift, rows_per_block, interleave, experts
        )
    elif experts is None:
        fallback.reconstruct(out, planes)
    else:
        for expert in experts.tolist():
            part = Planes(
                upper[expert],
                None if lower is None else lower[expert],
                fmt,
                None if row_shift is None else row_shift[expert],
                layout,
            )
            fallback.reconstruct(out[expert], part)


def _check_experts(experts: Tensor, upper: Tensor) -> None:
    if upper.dim() != 3:
        raise ValueError(f"experts is given for a weight of shape {tuple(upper.shape)}: omit it")
    check_tensor("experts", experts, (experts.numel(),), (torch.int64,))
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < upper.shape[0]:
        raise ValueError(
            f"experts is {experts.tolist()}: use numbers from 0 to {upper.shape[0] - 1}"
        )
