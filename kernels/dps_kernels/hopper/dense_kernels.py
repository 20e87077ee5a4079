"""The dense GEMM: nested weights from device memory, decoded in registers, into the tensor cores.

Sums are kept as [rows of the weight, tokens]: the weight is the operand that may come from
registers. One kernel serves the FP16 tensor cores (full mode, and fast mode with 16-bit
activations) and, with ``FP8``, the FP8 ones.
"""

import triton
import triton.language as tl

from dps_kernels.hopper.activations import scale_tile
from dps_kernels.hopper.decode import weight_tile
from dps_kernels.hopper.epilogue import finish, power_of_two, store

# A K tail of E5M2's lower bytes must decode to 0, which is not what zero bytes do.
LOWER_ZERO_E5M2 = tl.constexpr(-0x7F7F7F80)  # 0x80808080


@triton.jit
def block_of_tiles(pid, tiles_n, tiles_m, GROUP: tl.constexpr):
    """Tile of a program: ``GROUP`` tiles of rows share the tokens they read while in the cache."""
    per_group = GROUP * tiles_m
    first = pid // per_group * GROUP
    height = tl.minimum(tiles_n - first, GROUP)
    within = pid % per_group
    return first + within % height, within // height


@triton.jit(do_not_specialize=["M"])  # a batch of another size compiles nothing
def gemm(
    x,
    upper,
    lower,
    out,
    bias,
    row_shift,
    token_scale,
    M,
    N,
    K,
    x_stride,
    E5M2: tl.constexpr,
    FULL: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_X: tl.constexpr,
    SM: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One tile of ``x @ w.T``, or with ``SPLIT`` a part of its sum, one for each program of axis 1.

    ``x`` [M, K], ``upper`` and ``lower`` [N, K / 4] int32 words (E4M3 or E5M2 values [N, K] with
    ``FP8``) are pointers, or descriptors with ``TMA``. ``out`` is [M, N]; with ``SPLIT``, where
    every part has a step or more, float32 [parts, M, N] without scales and bias. ``SCALE_X``: ``x``
    is not FP16 and is scaled here, step by step, by powers of two.
    """
    PER: tl.constexpr = 1 if FP8 else 4  # weights of one element
    BW: tl.constexpr = BK // PER
    tiles_n = tl.cdiv(N, BN)
    pid_n, pid_m = block_of_tiles(tl.program_id(0), tiles_n, tl.cdiv(M, BM), GROUP)
    split = tl.program_id(1)
    row = pid_n * BN + tl.arange(0, BN)
    token = pid_m * BM + tl.arange(0, BM)
    steps = tl.cdiv(K, BK)
    parts = tl.num_programs(1)
    start = split * steps // parts * BK
    end = tl.minimum((split + 1) * steps // parts * BK, K)
    # Where the loop may never run, ptxas waits for every single warpgroup multiplication.
    tl.assume(end > start)
    column = tl.arange(0, BK)
    word = tl.arange(0, BW)
    if not TMA:
        x_at = x + (token % M).to(tl.int64)[:, None] * x_stride + (start + column)[None, :]
        w_at = (row % N).to(tl.int64)[:, None] * (K // PER) + (start // PER + word)[None, :]
        upper_at = upper + w_at
        if FULL:
            lower_at = lower + w_at
    acc = tl.zeros((BN, BM), tl.float32)
    for k in range(start, end, BK):
        if TMA:
            tokens = x.load([pid_m * BM, k])
            high = upper.load([pid_n * BN, k // PER])
            low = lower.load([pid_n * BN, k // PER]) if FULL else high
        elif EVEN_K:
            tokens = tl.load(x_at)
            high = tl.load(upper_at)
            low = tl.load(lower_at) if FULL else high
        else:
            words_inside = (k // PER + word < K // PER)[None, :]
            tokens = tl.load(x_at, mask=(k + column < K)[None, :], other=0.0)
            high = tl.load(upper_at, mask=words_inside, other=0.0)
            low = tl.load(lower_at, mask=words_inside, other=0) if FULL else high
        if not TMA:
            x_at += BK
            upper_at += BW
            if FULL:
                lower_at += BW
        if FP8:
            acc = tl.dot(high, tokens.T, acc, max_num_imprecise_acc=BK)
        else:
            if FULL and E5M2 and not EVEN_K:
                low = tl.where((k // PER + word < K // PER)[None, :], low, LOWER_ZERO_E5M2)
            weights = weight_tile(high, low, E5M2, FULL, SM, BN, BK)
            if SCALE_X:
                scaled, exponent = scale_tile(tokens)
                acc += tl.dot(weights, scaled.T) * power_of_two(-exponent)[None, :]
            else:
                acc = tl.dot(weights, tokens.T, acc)
    if SPLIT:
        store(acc, row, token, out + split.to(tl.int64) * M * N, N, M)
    else:
        acc = finish(acc, row, token, bias, row_shift, token_scale, N, M, E5M2, FULL, SM)
        store(acc, row, token, out, N, M)


@triton.jit(do_not_specialize=["M", "splits"])
def add_splits(
    parts,
    out,
    bias,
    row_shift,
    token_scale,
    M,
    N,
    splits,
    E5M2: tl.constexpr,
    FULL: tl.constexpr,
    SM: tl.constexpr,
    BN: tl.constexpr,
):
    """Add the parts of split sums, always in the same order, and finish them."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.program_id(1) + tl.arange(0, 1)
    acc = tl.zeros((BN, 1), tl.float32)
    at = token.to(tl.int64)[None, :] * N + row[:, None]
    for _ in range(splits):
        acc += tl.load(parts + at, mask=(row < N)[:, None], other=0)
        at += tl.cast(M, tl.int64) * N
    acc = finish(acc, row, token, bias, row_shift, token_scale, N, M, E5M2, FULL, SM)
    store(acc, row, token, out, N, M)
