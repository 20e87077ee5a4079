"""Activations as the tensor cores take them: scaled per token, in FP16 or FP8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dps_kernels.hopper.epilogue import power_of_two

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def fp16_exponent(peak):
    """Exponent that brings values up to ``peak`` just under FP16's largest, within float32's."""
    field = peak.to(tl.int32, bitcast=True) >> 23
    return 15 + 127 - tl.maximum(field, 16)


@triton.jit
def scale_tile(tokens):
    """FP16 tile [tokens, columns] in a GEMM's loop, and the exponents to undo on its sums."""
    values = tokens.to(tl.float32)
    exponent = fp16_exponent(tl.max(tl.abs(values), axis=1))
    return (values * power_of_two(exponent)[:, None]).to(tl.float16), exponent


@triton.jit
def _scale_rows(x, out, scale, K, x_stride, FP8: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    peak = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        inside = start + column < K
        values = tl.load(x + token * x_stride + start + column, mask=inside, other=0)
        peak = tl.maximum(peak, tl.abs(values.to(tl.float32)))
    top = tl.max(peak, axis=0)
    if FP8:
        step = tl.maximum(top, 1e-30) / FP8_MAX
        factor = 1 / step
    else:
        exponent = fp16_exponent(top)
        step = power_of_two(-exponent)
        factor = power_of_two(exponent)
    tl.store(scale + token, step)
    for start in range(0, K, BLOCK):
        inside = start + column < K
        values = tl.load(x + token * x_stride + start + column, mask=inside, other=0)
        scaled = values.to(tl.float32) * factor
        if FP8:
            # The order of the weights' columns, `k16`: logical 8j1+2t+j0 to place 4t+2j1+j0.
            groups = scaled.reshape(BLOCK // 16, 2, 4, 2).permute(0, 2, 1, 3)
            scaled = groups.reshape(BLOCK)
        tl.store(out + token * K + start + column, scaled.to(out.dtype.element_ty), mask=inside)


def to_fp16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each token by a power of two, exactly, so that FP16 holds it.

    Returns
    -------
    tuple
        float16 [M, K] and float32 [M]: ``x = scaled * scale``. BF16 values down to 2^-31 of the
        token's largest are kept to the last bit.
    """
    return _scaled(x, torch.float16)


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each token to E4M3, columns in the ``k16`` order of the weights.

    Returns
    -------
    tuple
        float8_e4m3fn [M, K] and float32 [M]: ``x`` is about ``scaled * scale``. K divides by 16.
    """
    return _scaled(x, torch.float8_e4m3fn)


def _scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tokens, columns = x.shape
    out = torch.empty(tokens, columns, dtype=dtype, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(columns), 4096)
    _scale_rows[(tokens,)](
        x,
        out,
        scale,
        columns,
        x.stride(0),
        dtype is not torch.float16,
        block,
        num_warps=block // 512 or 1,
    )
    return out, scale
