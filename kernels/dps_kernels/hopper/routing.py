"""Sorting routes by expert into blocks of one expert each.

The three arrays are those of vLLM's ``moe_align_block_size``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
"""Routes that one step of a program looks at."""


class Routing(NamedTuple):
    """Routes in the order of their experts. A *route* is one (token, choice) pair."""

    routes: Tensor
    """int32: numbers of routes, padded with the count of routes to whole blocks per expert."""
    experts: Tensor
    """int32: the expert of each block."""
    padded: Tensor
    """int32 [1]: how many of ``routes`` are in use, padding included."""


def sort_routes(topk_ids: Tensor, experts: int, block: int) -> Routing:
    """Sort routes by expert; within one they keep their order, so that results repeat.

    Parameters
    ----------
    topk_ids
        [T, top-k] int32 or int64, values from 0 to ``experts - 1``, contiguous.
    experts
        How many there are; those without routes get no block.
    block
        Routes of a block.
    """
    count = topk_ids.numel()
    blocks = min(count, (count + experts * (block - 1)) // block)
    routes = topk_ids.new_empty(blocks * block, dtype=torch.int32)
    of_block = topk_ids.new_empty(blocks, dtype=torch.int32)
    padded = topk_ids.new_empty(1, dtype=torch.int32)
    size = max(16, triton.next_power_of_2(experts + 1))
    _sort[(experts,)](
        topk_ids,
        routes,
        of_block,
        padded,
        count,
        experts,
        BLOCK=block,
        EXPERTS=size,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return Routing(routes, of_block, padded)


@triton.jit(do_not_specialize=["count"])  # or some batch sizes would compile while serving
def _sort(
    ids,
    routes,
    of_block,
    padded,
    count,
    experts,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Place the routes of one expert, after those of the experts before it."""
    mine = tl.program_id(0)
    within = tl.arange(0, CHUNK)
    number = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, count, CHUNK):
        chosen = tl.load(ids + start + within, mask=start + within < count, other=experts)
        counts += tl.histogram(chosen.to(tl.int32), EXPERTS)
    whole = tl.where(number < experts, (counts + BLOCK - 1) // BLOCK * BLOCK, 0)
    begin = tl.sum(tl.where(number < mine, whole, 0), axis=0)
    end = begin + tl.sum(tl.where(number == mine, whole, 0), axis=0)
    if mine == 0:
        tl.store(padded, tl.sum(whole, axis=0))
    for block in range(begin // BLOCK, end // BLOCK):
        tl.store(of_block + block, mine)
    at = begin
    for start in range(0, count, CHUNK):
        chosen = tl.load(ids + start + within, mask=start + within < count, other=experts)
        match = (chosen == mine).to(tl.int32)
        place = at + tl.cumsum(match, axis=0) - 1
        tl.store(routes + place, start + within, mask=match != 0)
        at += tl.sum(match, axis=0)
    rest = tl.arange(0, BLOCK)
    tl.store(routes + at + rest, tl.zeros((BLOCK,), tl.int32) + count, mask=at + rest < end)
