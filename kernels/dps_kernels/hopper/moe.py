"""Launching the routed experts of a layer: two grouped GEMMs over the routes, then their sum."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dps_kernels.hopper import activations, tiles
from dps_kernels.hopper.arch import Arch
from dps_kernels.hopper.dense import FP8_TYPES
from dps_kernels.hopper.moe_kernels import moe_gemm
from dps_kernels.hopper.routing import Routing, sort_routes
from dps_kernels.planes import Planes

SCALED_IN_LOOP = 16
"""Tokens of a tile up to which BF16 is scaled inside the GEMMs: two launches less, and half an
operation more per weight. With 32 tokens it would be one more."""

GROUP = 8
"""Blocks of routes that go through a tile of weights while it is in the cache."""

PROMOTE_FP8 = 128
"""Columns after which partial sums leave the FP8 tensor cores, which keep few bits."""


class Plan(NamedTuple):
    """How a layer's experts are multiplied."""

    kind: str
    """``full``, ``fast`` (W8A16) or ``fp8`` (W8A8)."""
    tile: tiles.Tile
    """Of both GEMMs. ``bm`` is how many routes of an expert make a block."""


def moe(
    x: Tensor, w13: Planes, w2: Planes, topk_weights: Tensor, topk_ids: Tensor, arch: Arch
) -> Tensor:
    """Run tokens through ``k16`` experts whose arguments `dps_kernels.moe` has checked.

    Raises
    ------
    ValueError
        If one weight has lower bytes and the other has none.
    """
    if (w13.lower is None) != (w2.lower is None):
        raise ValueError("lower is given for one of w13 and w2: both run in the same mode on a GPU")
    if x.shape[0] == 0:
        return torch.empty_like(x)
    plan = plan_for(topk_ids.numel(), w13, arch)
    return routed(x, w13, w2, topk_weights, topk_ids, plan, arch)


def plan_for(routes: int, w13: Planes, arch: Arch) -> Plan:
    """Choose the kernel and the tile for so many routes of a layer."""
    experts, gate_up, hidden = w13.upper.shape
    per_expert = -(-routes // experts)
    kind = tiles.kind_of(w13.lower is not None, per_expert, arch)
    return Plan(kind, tiles.lookup(f"moe {kind}", per_expert, gate_up, hidden, arch))


def routed(
    x: Tensor,
    w13: Planes,
    w2: Planes,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: Plan,
    arch: Arch,
) -> Tensor:
    """Sort the routes, multiply them and add up those of each token.

    Each route's result is written, weighted, to a place of its own and the ``top_k`` of a token are
    added in their order. Atomic additions would save that buffer, but add in the order in which
    programs happen to finish: the same request would not give the same tokens twice.

    Parameters
    ----------
    x
        [T, H], float16, bfloat16 or float32.
    w13, w2
        [E, 2I, H] and [E, H, I], ``k16``.
    topk_weights, topk_ids
        [T, top-k].

    Returns
    -------
    Tensor
        [T, H] in ``x.dtype``.
    """
    routing = sort_routes(topk_ids.contiguous(), w13.upper.shape[0], plan.tile.bm)
    tokens, top_k = topk_weights.shape
    hidden, inner = w2.upper.shape[1:]
    gated = x.new_empty(tokens * top_k, inner)
    _multiply(x, w13, None, gated, top_k, routing, plan, arch)
    out = x.new_empty(tokens * top_k, hidden)
    _multiply(gated, w2, topk_weights.contiguous(), out, 1, routing, plan, arch)
    return out.view(tokens, top_k, hidden).sum(1)


def parts_of(kind: str, tile: tiles.Tile, arch: Arch) -> int:
    """Into how many parts a tile's tokens are cut so that no two warps decode the same weights."""
    shared = arch.sm < 90 and kind != "fp8" and tile.bm * tile.warps >= 2 * tile.bn
    return 2 if shared else 1


def _multiply(
    x: Tensor,
    planes: Planes,
    route_weights: Tensor | None,
    out: Tensor,
    top_k: int,
    routing: Routing,
    plan: Plan,
    arch: Arch,
) -> None:
    """One grouped GEMM: with gates if the weight has twice as many rows as ``out`` columns."""
    kind, tile = plan
    routes, columns = out.shape[0], x.shape[1]
    gated = planes.upper.shape[1] == 2 * out.shape[1]
    fp8, full = kind == "fp8", kind == "full"
    parts = parts_of(kind, tile, arch)
    scale_x = x.dtype != torch.float16 and not fp8 and parts == 1 and tile.bm <= SCALED_IN_LOOP
    if fp8:
        operand, scale = activations.to_fp8(x)
    elif x.dtype == torch.float16 or scale_x:
        operand, scale = x.contiguous(), None
    else:
        operand, scale = activations.to_fp16(x)
    word = FP8_TYPES[planes.fmt] if fp8 else torch.int32
    made = tile.bn // 2 if gated else tile.bn
    moe_gemm[(routing.experts.shape[0] * triton.cdiv(out.shape[1], made),)](
        operand,
        scale,
        planes.upper.view(word),
        planes.lower.view(torch.int32) if full and planes.lower is not None else None,
        planes.row_shift,
        route_weights,
        out,
        routing.routes,
        routing.experts,
        routing.padded,
        out.shape[1],
        columns,
        routes,
        TOP_K=top_k,
        GATED=gated,
        E5M2=planes.fmt == "e5m2",
        FULL=full,
        FP8=fp8,
        SCALE_X=scale_x,
        SM=arch.sm,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        GROUP=GROUP,
        IMPRECISE=min(PROMOTE_FP8, tile.bk) if fp8 else None,
        EVEN_K=columns % tile.bk == 0,
        PARTS=parts,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
