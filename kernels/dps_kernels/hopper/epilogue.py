"""From float32 sums to results: the scales that the loops left out, and the bias."""

import triton
import triton.language as tl

from dps_kernels.hopper.decode import unscale


@triton.jit
def power_of_two(exponent):
    """2**exponent as float32 for -126 <= exponent <= 127, from its bits."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def finish(
    acc,
    row,
    token,
    bias,
    row_shift,
    token_scale,
    N,
    M,
    E5M2: tl.constexpr,
    FULL: tl.constexpr,
    SM: tl.constexpr,
):
    """Scale sums [rows, tokens] and add the bias; ``row`` and ``token`` are their indices."""
    acc = unscale(acc, E5M2, FULL, SM)
    if row_shift is not None:
        shift = tl.load(row_shift + row, mask=row < N, other=0)
        acc *= power_of_two(-shift.to(tl.int32))[:, None]
    if token_scale is not None:
        acc *= tl.load(token_scale + token, mask=token < M, other=0)[None, :]
    if bias is not None:
        acc += tl.load(bias + row, mask=row < N, other=0).to(tl.float32)[:, None]
    return acc


@triton.jit
def store(acc, row, token, out, N, M):
    """Write sums [rows, tokens] into ``out`` [M, N], rounded to its type."""
    at = token.to(tl.int64)[None, :] * N + row[:, None]
    inside = (token < M)[None, :] & (row < N)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
