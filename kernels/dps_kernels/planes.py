"""The weights that the kernels read, the order of their bytes, and the checks on both."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dps_kernels.library import has_packed, native, runs_compiled

IS_E5M2 = {"e4m3": False, "e4m3_row": False, "e5m2": True}
FORMATS = tuple(IS_E5M2)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


class Layout(NamedTuple):
    """Order of the elements within one matrix [N, K], the same in both planes.

    ``[N/R][K/I][R][I]`` of the columns in their order, or with ``k16`` of the columns permuted
    within every 16: ``stored[4t + 2i + j] = column[8i + 2t + j]``, so that one thread of a tensor
    core finds its operands side by side.
    """

    rows_per_block: int = 1
    """R. Divides N."""
    interleave: int = 0
    """I. Divides K; 0 stands for K, which is row-major order."""
    k16: bool = False
    """Whether columns are permuted within groups of 16. Divides K."""


ROW_MAJOR = Layout()
K16 = Layout(k16=True)
PACKED = Layout(32, 2)
"""What bfloat16 dot products and AMX tiles read; they multiply the weight as bfloat16."""


class Planes(NamedTuple):
    """Byte planes of a nested weight, [N, K] or [E, N, K], contiguous.

    `check_planes` tells what is wrong with one. The GEMMs run it only once something has failed:
    check a weight where it is made.
    """

    upper: Tensor
    """uint8: FP8 codes."""
    lower: Tensor | None
    """uint8 residuals of the same shape; ``None`` computes in fast mode, without reading any."""
    fmt: str
    """``e4m3``, ``e4m3_row`` or ``e5m2``."""
    row_shift: Tensor | None
    """int8 [N] or [E, N] for ``e4m3_row``: row ``n`` holds ``w * 2**row_shift[n]``."""
    layout: Layout = ROW_MAJOR
    """Order of the elements of ``upper`` and ``lower``, see `preferred_layout`."""


def native_planes(planes: Planes) -> Any:
    """Give the compiled library's view of planes, or ``None`` where it is not to read them."""
    if not runs_compiled(planes.upper) or planes.fmt not in IS_E5M2:
        return None
    return native().Planes(planes.upper, planes.lower, IS_E5M2[planes.fmt], planes.row_shift)


def multiplies(layout: Layout, act_dtype: torch.dtype) -> bool:
    """Whether the compiled library multiplies activations by weights in this order."""
    if layout == PACKED:
        return act_dtype == torch.bfloat16 and has_packed()
    return layout == ROW_MAJOR


def preferred_layout(device_type: str, rows: int, columns: int, act_dtype: torch.dtype) -> Layout:
    """Give the order in which the kernels of a device read weights fastest.

    Parameters
    ----------
    device_type
        ``"cpu"`` or ``"cuda"``.
    rows, columns
        N and K of one matrix.
    act_dtype
        Type of the activations, and of the weight before it was split: only a weight that came
        from bfloat16 keeps its values in the packed order.
    """
    if device_type == "cuda":
        return K16 if columns % 16 == 0 else ROW_MAJOR
    # The gate rows and the up rows of an expert must each be whole blocks: hence 64.
    whole = rows % 64 == 0 and columns % 32 == 0
    return PACKED if whole and multiplies(PACKED, act_dtype) else ROW_MAJOR


def to_layout(plane: Tensor, layout: Layout) -> Tensor:
    """Reorder a row-major tensor [..., N, K] into a layout; its shape and bytes are kept.

    Raises
    ------
    ValueError
        If the layout does not divide the matrix.
    """
    rows, interleave, k16 = check_layout(layout, *plane.shape[-2:])
    lead = plane.shape[:-2]
    if k16:
        plane = plane.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).reshape(plane.shape)
    blocks = plane.unflatten(-1, (-1, interleave)).unflatten(-3, (-1, rows)).transpose(-3, -2)
    return blocks.reshape(*lead, *plane.shape[-2:]).contiguous()


def from_layout(plane: Tensor, layout: Layout) -> Tensor:
    """Undo `to_layout`."""
    n, k = plane.shape[-2:]
    rows, interleave, k16 = check_layout(layout, n, k)
    lead = plane.shape[:-2]
    blocks = plane.reshape(*lead, n // rows, k // interleave, rows, interleave).transpose(-3, -2)
    ordered = blocks.reshape(*lead, n, k)
    if k16:
        ordered = ordered.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).reshape(plane.shape)
    return ordered


def check_planes(planes: Planes, dimensions: tuple[int, ...]) -> None:
    """Raise for planes that the kernels cannot read, naming what is wrong."""
    upper, lower, fmt, row_shift, layout = planes
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
    check_layout(layout, *upper.shape[-2:])


def check_layout(layout: Layout, rows: int, columns: int) -> Layout:
    """Give the layout with its ``interleave`` resolved, or raise if the matrix does not divide."""
    interleave = layout.interleave or columns
    if layout.rows_per_block < 1 or rows % layout.rows_per_block:
        raise ValueError(f"rows_per_block is {layout.rows_per_block}: it must divide {rows} rows")
    if interleave < 1 or columns % interleave:
        raise ValueError(f"interleave is {interleave}: it must divide {columns} columns")
    if layout.k16 and columns % 16:
        raise ValueError(f"k16 is set for {columns} columns: it needs a multiple of 16")
    return Layout(layout.rows_per_block, interleave, layout.k16)


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
