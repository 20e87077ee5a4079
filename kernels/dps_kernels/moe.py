"""Routed experts of a mixture-of-experts layer on nested weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dps_kernels import fallback
from dps_kernels.library import native, runs_compiled
from dps_kernels.planes import (
    FLOATS,
    K16,
    PACKED,
    Planes,
    check_planes,
    multiplies,
    native_planes,
)


def moe(
    x: Tensor,
    w13: Planes,
    w2: Planes,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Run each token through its experts: ``sum_k weight_k * w2(silu(gate(x)) * up(x))``.

    Parameters
    ----------
    x
        [T, H], float32, float16 or bfloat16.
    w13
        [E, 2I, H]: gate rows, then up rows.
    w2
        [E, H, I].
    topk_weights, topk_ids
        [T, top-k]: the routing weights and the experts' numbers, 0 to E - 1.
    activation
        ``"silu"``.

    Returns
    -------
    Tensor
        [T, H] in ``x.dtype``. On a CPU the sums are float32, and of the intermediates only the
        gated rows of packed weights are rounded to bfloat16; CUDA tensors in the ``K16`` layout go
        to the Triton kernels, which round those that they store to ``x.dtype``.

    Raises
    ------
    ValueError, TypeError
        Names the argument whose shape, dtype or value does not fit.
    """
    if activation != "silu":
        raise ValueError(f"activation is {activation!r}: only 'silu' is supported")
    return prepare_moe(w13, w2, x.dtype)(x, topk_weights, topk_ids)


def prepare_moe(
    w13: Planes, w2: Planes, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``moe`` of one layer's weights, with all decided that activations have no part in.

    Parameters
    ----------
    w13, w2
        As in ``moe``.
    dtype
        Of the activations.

    Returns
    -------
    Callable
        Takes ``x``, ``topk_weights`` and ``topk_ids``.
    """
    experts = _compiled(w13, w2, dtype)
    if experts is None:
        return partial(_general, w13, w2)

    def compiled(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        try:
            y: Tensor = experts(x, topk_weights, topk_ids)
        except (RuntimeError, TypeError):
            _check(x, w13, w2, topk_weights, topk_ids)
            if x.dtype != dtype:
                raise TypeError(f"x is {x.dtype}: the weight was prepared for {dtype}") from None
            raise
        return y

    return compiled


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose each token's experts: the largest logits, weighted by the softmax among themselves.

    Parameters
    ----------
    logits
        [T, E], float32, float16 or bfloat16.
    top_k
        Experts a token, 1 to E.

    Returns
    -------
    tuple
        Weights, float32 but rounded to the logits' dtype, and experts' numbers, int64, both
        [T, top-k] in the order in which ``torch.topk`` finds them unsorted.
    """
    if logits.dim() != 2 or logits.dtype not in FLOATS:
        raise ValueError(
            f"logits is {logits.dtype} of shape {tuple(logits.shape)}: [tokens, experts] of "
            "float32, float16 or bfloat16 is needed"
        )
    if runs_compiled(logits):
        weights: Tensor
        ids: Tensor
        weights, ids = native().route(logits, top_k)
        return weights, ids
    best, ids = torch.topk(logits, top_k, dim=-1, sorted=False)
    return best.softmax(dim=-1).float(), ids


def _general(w13: Planes, w2: Planes, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    _check(x, w13, w2, topk_weights, topk_ids)
    if w13.upper.device.type == "cuda" and w13.layout == w2.layout == K16:
        from dps_kernels.hopper import arch  # needs triton
        from dps_kernels.hopper import moe as grouped

        return grouped.moe(x, w13, w2, topk_weights, topk_ids, arch.of_device(w13.upper.device))
    return fallback.moe(x, fallback.decode(w13), fallback.decode(w2), topk_weights, topk_ids)


def _compiled(w13: Planes, w2: Planes, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    weights13, weights2 = native_planes(w13), native_planes(w2)
    if weights13 is None or weights2 is None:
        return None
    if w13.layout != w2.layout or not multiplies(w13.layout, dtype):
        return None
    experts: Callable[..., Tensor] = native().Experts(w13.layout == PACKED, weights13, weights2)
    return experts


def _check(x: Tensor, w13: Planes, w2: Planes, topk_weights: Tensor, topk_ids: Tensor) -> None:
    check_planes(w13, (3,))
    check_planes(w2, (3,))
    upper13, upper2 = w13.upper, w2.upper
    experts, gate_up, hidden = upper13.shape
    if gate_up % 2 or tuple(upper2.shape) != (experts, hidden, gate_up // 2):
        raise ValueError(
            f"w2 has shape {tuple(upper2.shape)}: w13 of shape {tuple(upper13.shape)} needs "
            f"{(experts, hidden, gate_up // 2)}"
        )
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"x has shape {tuple(x.shape)}: (tokens, {hidden}) is needed")
    if x.dtype not in FLOATS:
        raise TypeError(f"x is {x.dtype}: use {' or '.join(map(str, FLOATS))}")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids has shape {tuple(topk_ids.shape)}: ({x.shape[0]}, top-k)")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights has shape {tuple(topk_weights.shape)} but topk_ids "
            f"{tuple(topk_ids.shape)}: they must agree"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids is {topk_ids.dtype}: use torch.int32 or torch.int64")
