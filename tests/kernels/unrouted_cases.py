"""Experts that no token is routed to lie in pages that cannot be read: one touch ends the process.

A module of its own, so that it runs in a process that may end so.
"""

import ctypes
import mmap
import sys

import torch
from dps_kernels import PACKED, ROW_MAJOR, Layout, Planes, library, moe, reconstruct, to_layout

from tests.kernels.weights import nested, normal, planes

EXPERTS, HIDDEN, INNER = 6, 64, 128
ROUTED = (0, 2, 3)
"""Neighbours of the others on either side: reading on past one's own end is a touch, too."""
PROT_NONE, PROT_READ = 0, 1
LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(plane: torch.Tensor) -> torch.Tensor:
    """A copy of ``[E, N, K]`` bytes of which only the routed experts can be read."""
    expert_bytes = plane[0].numel()
    assert expert_bytes % mmap.PAGESIZE == 0
    memory = mmap.mmap(-1, plane.numel())
    copy = torch.frombuffer(memory, dtype=torch.uint8).view(plane.shape).copy_(plane)
    for expert in range(len(plane)):
        protection = PROT_READ if expert in ROUTED else PROT_NONE
        address = ctypes.c_void_p(copy[expert].data_ptr())
        if LIBC.mprotect(address, ctypes.c_size_t(expert_bytes), protection):
            raise OSError(ctypes.get_errno(), "mprotect")
    return copy


def ordered(weight: Planes, layout: Layout) -> Planes:
    lower = None if weight.lower is None else to_layout(weight.lower, layout)
    return weight._replace(upper=to_layout(weight.upper, layout), lower=lower, layout=layout)


def behind_guards(weight: Planes) -> Planes:
    lower = None if weight.lower is None else guarded(weight.lower)
    return weight._replace(upper=guarded(weight.upper), lower=lower)


def check(layout: Layout, dtype: torch.dtype) -> None:
    """Products and rebuilt weights of the routed experts, as on readable memory."""
    for full in (True, False):
        w13, w2 = (
            ordered(planes(nested(shape, "e4m3_row", dtype, seed=seed), full), layout)
            for seed, shape in enumerate(
                ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)), start=3
            )
        )
        safe13, safe2 = behind_guards(w13), behind_guards(w2)
        for tokens in (1, 5, 70, 600):
            x = normal(tokens, HIDDEN, dtype=dtype, seed=1)
            factors, choice = normal(tokens, len(ROUTED), seed=5).softmax(dim=-1).topk(2, dim=-1)
            ids = torch.tensor(ROUTED)[choice]
            y = moe(x, safe13, safe2, factors, ids)
            assert torch.equal(y, moe(x, w13, w2, factors, ids)), (layout, full, tokens)
        out = torch.zeros(w13.upper.shape, dtype=dtype)
        reconstruct(out, safe13, experts=torch.tensor(ROUTED))
        assert out[list(ROUTED)].any(dim=(1, 2)).all()


def touch() -> None:
    """One token to an expert that cannot be read."""
    w13, w2 = (
        behind_guards(planes(nested(shape, "e4m3", torch.float16), False))
        for shape in ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    )
    moe(torch.ones(1, HIDDEN), w13, w2, torch.ones(1, 1), torch.ones(1, 1).long())


def only_routed_experts_are_read() -> None:
    check(ROW_MAJOR, torch.float16)
    check(ROW_MAJOR, torch.bfloat16)
    if library.has_packed():
        check(PACKED, torch.bfloat16)


if __name__ == "__main__":
    {"check": only_routed_experts_are_read, "touch": touch}[sys.argv[1]]()
