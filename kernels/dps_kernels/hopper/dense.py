"""Launching the dense GEMM: which kernel, which tile, which form of the activations.

Nothing here looks at a tensor's values or waits for the device: launches are safe in CUDA graphs.
What is compiled depends on the weight, on the table's tile and on whether the sum over K is split.
All three can change with the number of tokens: `warm_up` lists the batches that compile everything.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dps_kernels.hopper import activations, tiles
from dps_kernels.hopper.arch import Arch
from dps_kernels.hopper.dense_kernels import add_splits, gemm
from dps_kernels.planes import Planes

SCALED_IN_LOOP = 32
"""Tokens of a tile up to which BF16 is scaled inside the GEMM: a launch less, a few operations
more per weight."""

GROUP = 8
"""Tiles of rows that run side by side on the same tokens."""

BLOCK = 512
"""Results of one program that adds split sums."""

FP8_TYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e4m3_row": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def linear(x: Tensor, planes: Planes, bias: Tensor | None, arch: Arch) -> Tensor:
    """``x @ w.T + bias`` for a ``k16`` weight [N, K] that `dps_kernels.linear` has checked.

    Raises
    ------
    ValueError
        If the planes do not start on 16 bytes.
    """
    check_alignment(planes)
    rows, columns = planes.upper.shape
    tokens = x.reshape(-1, columns)
    count = tokens.shape[0]
    out = torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device=x.device)
    if count:
        kind = tiles.kind_of(planes.lower is not None, count, arch)
        tile = tiles.choose(kind, count, rows, columns, arch)
        multiply(tokens, planes, bias, out.view(count, rows), kind, tile, arch)
    return out


def multiply(
    x: Tensor,
    planes: Planes,
    bias: Tensor | None,
    out: Tensor,
    kind: str,
    tile: tiles.Tile,
    arch: Arch,
) -> None:
    """Run one GEMM with a given kernel and tile: [M, K] into ``out`` [M, N]."""
    (count, columns), rows = x.shape, planes.upper.shape[0]
    e5m2 = planes.fmt == "e5m2"
    scale, scale_x = None, False
    if kind == "fp8":
        x, scale = activations.to_fp8(x)
    elif x.dtype == torch.bfloat16 and tile.bm <= SCALED_IN_LOOP:
        scale_x = True
    elif x.dtype != torch.float16:
        x, scale = activations.to_fp16(x)
    x = _aligned(x)
    upper = planes.upper.view(FP8_TYPES[planes.fmt] if kind == "fp8" else torch.int32)
    lower = None if planes.lower is None else planes.lower.view(torch.int32)
    splits = min(tile.splits, triton.cdiv(columns, tile.bk))
    parts = out
    if splits > 1:
        parts = out.new_empty(splits, count, rows, dtype=torch.float32)
    scales = (bias, planes.row_shift, scale)
    width = tile.bk * upper.shape[1] // columns
    gemm[(triton.cdiv(rows, tile.bn) * triton.cdiv(count, tile.bm), splits)](
        _operand(x, tile.bm, tile.bk, arch),
        _operand(upper, tile.bn, width, arch),
        _operand(lower, tile.bn, width, arch),
        parts,
        *scales,
        count,
        rows,
        columns,
        x.stride(0),
        E5M2=e5m2,
        FULL=kind == "full",
        FP8=kind == "fp8",
        SCALE_X=scale_x,
        SM=arch.sm,
        TMA=arch.descriptors,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        SPLIT=splits > 1,
        GROUP=GROUP,
        EVEN_K=columns % tile.bk == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        grid = (triton.cdiv(rows, BLOCK), count)
        full = kind == "full"
        add_splits[grid](parts, out, *scales, count, rows, splits, e5m2, full, arch.sm, BLOCK)


def check_alignment(planes: Planes) -> None:
    """Raise for planes that cannot be copied 16 bytes at a time."""
    for name, plane in (("upper", planes.upper), ("lower", planes.lower)):
        if plane is not None and plane.data_ptr() % 16:
            raise ValueError(
                f"{name} starts at address {plane.data_ptr():#x}: it must be a multiple of 16, "
                "as that of a tensor of its own is (clone it)"
            )


def _aligned(x: Tensor) -> Tensor:
    """Tokens whose rows start on 16 bytes; strides count even where there is one token."""
    rows_follow = x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    if rows_follow and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _operand(tensor: Tensor | None, height: int, width: int, arch: Arch) -> Any:
    """Tensor for pointers; descriptor of its tiles where the GPU copies them itself."""
    if tensor is None or not arch.descriptors:
        return tensor
    return TensorDescriptor.from_tensor(tensor, [height, width])
