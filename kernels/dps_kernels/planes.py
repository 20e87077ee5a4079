"""The weights that the kernels read, how they may be packed, and the checks on both."""

from typing import NamedTuple

import torch
from torch import Tensor

FORMATS = ("e4m3", "e4m3_row", "e5m2")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


class Planes(NamedTuple):
    """Byte planes of a nested weight, [N, K] or [E, N, K], contiguous."""

    upper: Tensor
    """uint8: FP8 codes."""
    lower: Tensor | None
    """uint8 residuals of the same shape; ``None`` computes in fast mode, without reading any."""
    fmt: str
    """``e4m3``, ``e4m3_row`` or ``e5m2``."""
    row_shift: Tensor | None
    """int8 [N] or [E, N] for ``e4m3_row``: row ``n`` holds ``w * 2**row_shift[n]``."""


class Packing(NamedTuple):
    """Order of elements within one matrix: ``[N/R][K/I][R][I]``."""

    rows_per_block: int = 1
    """R. Divides N."""
    interleave: int = 0
    """I. Divides K; 0 stands for K, which is row-major order."""


ROW_MAJOR = Packing()


def check_planes(planes: Planes, dimensions: tuple[int, ...]) -> None:
    """Raise for planes that the kernels cannot read, naming what is wrong."""
    upper, lower, fmt, row_shift = planes
    if fmt not in FORMATS:
        raise ValueError(f"fmt is {fmt!r}: use one of {', '.join(FORMATS)}")
    if upper.dim() not in dimensions or upper.numel() == 0:
        wanted = " or ".join({2: "[N, K]", 3: "[E, N, K]"}[d] for d in dimensions)
        raise ValueError(f"upper has shape {tuple(upper.shape)}: give a filled {wanted}")
    check_tensor("upper", upper, upper.shape, (torch.uint8,))
    if lower is not None:
        check_tensor("lower", lower, upper.shape, (torch.uint8,))
    if (fmt == "e4m3_row") != (row_shift is not None):
        raise ValueError(
            f"row_shift is {'missing' if row_shift is None else 'given'} for fmt {fmt!r}: "
            "e4m3_row needs it, the other formats have none"
        )
    if row_shift is not None:
        check_tensor("row_shift", row_shift, upper.shape[:-1], (torch.int8,))


def check_packing(packing: Packing, rows: int, columns: int) -> Packing:
    """Give the packing with its ``interleave`` resolved, or raise if the matrix does not divide."""
    interleave = packing.interleave or columns
    if packing.rows_per_block < 1 or rows % packing.rows_per_block:
        raise ValueError(f"rows_per_block is {packing.rows_per_block}: it must divide {rows} rows")
    if interleave < 1 or columns % interleave:
        raise ValueError(f"interleave is {interleave}: it must divide {columns} columns")
    return Packing(packing.rows_per_block, interleave)


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless the tensor is contiguous, of this shape and of one of these dtypes."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: {tuple(shape)} is needed")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}: use {' or '.join(map(str, dtypes))}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: make it contiguous")
