"""Dense layers: nested weights and ordinary 16-bit ones."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dps_kernels import fallback
from dps_kernels.library import native, runs_compiled
from dps_kernels.planes import (
    FLOATS,
    HALVES,
    K16,
    PACKED,
    Planes,
    check_planes,
    check_tensor,
    multiplies,
    native_planes,
)


def linear(x: Tensor, planes: Planes, bias: Tensor | None = None) -> Tensor:
    """Multiply by a nested weight that is decoded on the way: ``y = x @ w.T + bias``.

    The sum runs in float32. On a CPU its order does not depend on the number of tokens: a token's
    result is the same in every batch. CUDA tensors in the ``K16`` layout go to the Triton kernels,
    whose tiles do depend on it; in fast mode, many tokens at once are themselves rounded to FP8.

    Parameters
    ----------
    x
        [..., K], float32, float16 or bfloat16.
    planes
        Weight [N, K]; without ``lower`` the fast-mode weight is used.
    bias
        [N], any of these float types, or ``None``.

    Returns
    -------
    Tensor
        [..., N] in ``x.dtype``.

    Raises
    ------
    ValueError, TypeError
        Names the argument whose shape or dtype does not fit.
    """
    return prepare_linear(planes, x.dtype)(x, bias)


def prepare_linear(planes: Planes, dtype: torch.dtype) -> Callable[[Tensor, Tensor | None], Tensor]:
    """``linear`` of one weight, with all decided that activations have no part in.

    Parameters
    ----------
    planes
        As in ``linear``.
    dtype
        Of the activations.

    Returns
    -------
    Callable
        Takes ``x`` and ``bias``.
    """
    product = compiled_product(planes, dtype)
    if product is None:
        return partial(_general, planes)
    return explained(product, planes, dtype)


def explained(
    product: Callable[[Tensor, Tensor | None], Tensor], planes: Planes, dtype: torch.dtype
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Let a compiled product of a weight say what is wrong with its arguments."""

    def compiled(x: Tensor, bias: Tensor | None) -> Tensor:
        try:
            return product(x, bias)
        except (RuntimeError, TypeError):
            _check(x, planes, bias)
            if x.dtype != dtype:
                raise TypeError(f"x is {x.dtype}: the weight was prepared for {dtype}") from None
            raise

    return compiled


def _general(planes: Planes, x: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, planes, bias)
    if planes.upper.device.type == "cuda" and planes.layout == K16:
        from dps_kernels.hopper import arch, dense  # needs triton

        return dense.linear(x, planes, bias, arch.of_device(planes.upper.device))
    return fallback.linear(x, fallback.decode(planes), bias)


def compiled_product(planes: Planes, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Prepare a weight in the compiled library; ``None`` where that does not multiply by it."""
    weights = native_planes(planes)
    if weights is None or not multiplies(planes.layout, dtype):
        return None
    product: Callable[..., Tensor] = native().Linear(planes.layout == PACKED, weights)
    return product


def linear_16bit(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by an unsplit float16 or bfloat16 weight, float32 accumulation.

    For CPUs without native 16-bit matrix multiplication, where torch's own is several times slower
    than its float32 one.

    Parameters
    ----------
    x
        [..., K], float32, float16 or bfloat16.
    weight
        [N, K], float16 or bfloat16, contiguous.
    bias
        [N] or ``None``.

    Raises
    ------
    ValueError, TypeError
        Names the argument whose shape or dtype does not fit.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: give a filled [N, K]")
    check_tensor("weight", weight, weight.shape, HALVES)
    _check_operands(x, weight, bias)
    if runs_compiled(weight):
        y: Tensor = native().linear_16bit(x, weight, bias)
        return y
    return fallback.linear(x, weight, bias)


def _check(x: Tensor, planes: Planes, bias: Tensor | None) -> None:
    check_planes(planes, (2,))
    _check_operands(x, planes.upper, bias)


def _check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    rows, columns = weight.shape
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(f"x has shape {tuple(x.shape)}: its last dimension must be {columns}")
    if x.dtype not in FLOATS:
        raise TypeError(f"x is {x.dtype}: use {' or '.join(map(str, FLOATS))}")
    if bias is not None:
        check_tensor("bias", bias, (rows,), FLOATS)
