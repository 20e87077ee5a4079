"""The grouped GEMM of routed experts: one launch multiplies each token by its experts' weights.

Tokens come sorted by expert in blocks of ``BM``, each block of one expert, in the arrays that
`routing.sort_routes` makes. A *route* is one (token, choice) pair; route ``r`` belongs to token
``r // top_k``.
"""

import triton
import triton.language as tl

from dps_kernels.hopper.activations import scale_tile
from dps_kernels.hopper.decode import unscale, weight_tile
from dps_kernels.hopper.epilogue import power_of_two


@triton.jit(do_not_specialize=["ROUTES"])  # or some batch sizes would compile while serving
def moe_gemm(
    x,
    token_scale,
    upper,
    lower,
    row_shift,
    route_weights,
    out,
    sorted_routes,
    block_experts,
    padded_routes,
    N,
    K,
    ROUTES,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    E5M2: tl.constexpr,
    FULL: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_X: tl.constexpr,
    SM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    IMPRECISE: tl.constexpr,
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One tile of ``out[route] = x[route // TOP_K] @ w[expert of route].T``.

    ``x`` [tokens, K]; ``upper`` and ``lower`` [E, rows, K / 4] int32 words of ``k16`` planes (or
    FP8 values [E, rows, K] with ``FP8``); ``out`` [routes, N]. ``SCALE_X``: ``x`` is not FP16 and
    is scaled here, step by step, by powers of two.

    With ``GATED`` the weight has 2N rows, gates before ups, and ``out`` is ``silu(gate) * up``: a
    tile takes its ``BN`` rows eight gates, eight ups, eight gates, ... because a thread of a
    tensor-core fragment holds rows ``i`` and ``i + 8``; a gate meets its up in one thread.
    With ``route_weights`` each route's result is multiplied by its weight.

    ``PARTS`` = 2 multiplies the tile's tokens in two halves. Before Hopper, Triton gives warps
    tokens of their own as soon as a tile is not twice as high as wide, and each such warp would
    decode the weights again.
    """
    OUT: tl.constexpr = BN // 2 if GATED else BN  # columns of the result that a tile makes
    tiles_n = tl.cdiv(N, OUT)
    blocks = tl.load(padded_routes) // BM
    pid = tl.program_id(0)
    per_group = GROUP * tiles_n
    first = pid // per_group * GROUP
    if first >= blocks:
        return
    height = tl.minimum(blocks - first, GROUP)
    within = pid % per_group
    block = first + within % height
    tile = within // height
    if tile >= tiles_n:
        return
    expert = tl.load(block_experts + block).to(tl.int64)
    local = tl.arange(0, BN)
    if GATED:
        column = tile * OUT + local // 16 * 8 + local % 8
        row = column % N + local // 8 % 2 * N
        rows = 2 * N
        column = tile * OUT + tl.arange(0, OUT)
    else:
        column = tile * OUT + local
        row = column % N
        rows = N

    PART: tl.constexpr = BM // PARTS
    at = sorted_routes + block * BM + tl.arange(0, PART)
    route = tl.load(at)
    route1 = tl.load(at + PART) if PARTS == 2 else route

    PER: tl.constexpr = 1 if FP8 else 4  # weights of one element
    WORDS: tl.constexpr = BK // PER
    k = tl.arange(0, BK)
    word = tl.arange(0, WORDS)
    x_at = x + _token(route, ROUTES, TOP_K)[:, None] * K + k[None, :]
    x1_at = x + _token(route1, ROUTES, TOP_K)[:, None] * K + k[None, :]
    w_at = expert * rows * (K // PER) + row.to(tl.int64)[:, None] * (K // PER) + word[None, :]
    upper_at = upper + w_at
    if FULL:
        lower_at = lower + w_at
    acc = tl.zeros((BN, PART), tl.float32)
    acc1 = acc
    # Where the loop may never run, ptxas waits for every single warpgroup multiplication.
    tl.assume(K > 0)
    for start in range(0, K, BK):
        inside_x = (start + k < K)[None, :]
        inside = (start // PER + word < K // PER)[None, :]
        tokens = _load(x_at, inside_x, EVEN_K)
        high = _load(upper_at, inside, EVEN_K)
        low = _load(lower_at, inside, EVEN_K) if FULL else high
        if FULL and E5M2 and not EVEN_K:
            low = tl.where(inside, low, -0x7F7F7F80)  # zero bytes are no E5M2 zero
        weights = high if FP8 else weight_tile(high, low, E5M2, FULL, SM, BN, BK)
        if SCALE_X:
            scaled, exponent = scale_tile(tokens)
            acc += tl.dot(weights, scaled.T) * power_of_two(-exponent)[None, :]
        else:
            acc = tl.dot(weights, tokens.T, acc, max_num_imprecise_acc=IMPRECISE)
        if PARTS == 2:
            tokens1 = _load(x1_at, inside_x, EVEN_K)
            acc1 = tl.dot(weights, tokens1.T, acc1, max_num_imprecise_acc=IMPRECISE)
        x_at += BK
        x1_at += BK
        upper_at += WORDS
        if FULL:
            lower_at += WORDS

    acc = unscale(acc, E5M2, FULL, SM)
    acc1 = unscale(acc1, E5M2, FULL, SM)
    if row_shift is not None:
        shift = tl.load(row_shift + expert * rows + row)
        scale = power_of_two(-shift.to(tl.int32))[:, None]
        acc *= scale
        acc1 *= scale
    _finish(acc, token_scale, route_weights, out, route, column, N, ROUTES, TOP_K, GATED)
    if PARTS == 2:
        _finish(acc1, token_scale, route_weights, out, route1, column, N, ROUTES, TOP_K, GATED)


@triton.jit
def _finish(
    acc,
    token_scale,
    route_weights,
    out,
    route,
    column,
    N,
    ROUTES,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
):
    """Scale sums [rows, routes], apply the gates, and write them."""
    if token_scale is not None:
        acc *= tl.load(token_scale + _token(route, ROUTES, TOP_K))[None, :]
    if GATED:
        ROWS: tl.constexpr = acc.shape[0]
        PART: tl.constexpr = acc.shape[1]
        pairs = acc.reshape(ROWS // 16, 2, 8, PART).permute(0, 2, 3, 1)
        gate, up = pairs.reshape(ROWS // 2, PART, 2).split()
        acc = gate * tl.sigmoid(gate) * up
    if route_weights is not None:
        weight = tl.load(route_weights + route, mask=route < ROUTES, other=0).to(tl.float32)
        acc *= weight[None, :]
    _store(acc, out, route, column, N, ROUTES)


@triton.jit
def _store(values, out, route, column, N, ROUTES):
    """Write [columns, routes] into ``out`` [routes, N]."""
    at = route.to(tl.int64)[None, :] * N + column[:, None]
    inside = (route < ROUTES)[None, :] & (column < N)[:, None]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _token(route, ROUTES, TOP_K: tl.constexpr):
    """Row of ``x`` of a route; padding reads the first one and is not stored."""
    return tl.where(route < ROUTES, route // TOP_K, 0).to(tl.int64)


@triton.jit
def _load(at, inside, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)
