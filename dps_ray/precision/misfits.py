"""Weights that a format cannot represent exactly, kept aside so that full mode stays lossless."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dps_ray.precision.chunks import row_chunks
from dps_ray.precision.nested import NestedTensor, decode_full


@dataclass(frozen=True)
class Misfits:
    """Sparse list of the values that decoding does not give back.

    Parameters
    ----------
    index
        int64, flat positions in the weight, ascending.
    value
        The checkpoint's 16-bit values at these positions.
    max_abs_error, max_rel_error
        Worst error of the decoded values, absolute and relative to the checkpoint's value.
    """

    index: Tensor
    value: Tensor
    max_abs_error: float
    max_rel_error: float

    @property
    def count(self) -> int:
        return self.index.numel()


def find_misfits(original: Tensor, decoded: Tensor) -> Misfits:
    """Compare two 16-bit tensors of one shape and dtype bit for bit.

    Raises
    ------
    ValueError
        If shapes or dtypes differ.
    """
    if original.shape != decoded.shape or original.dtype != decoded.dtype:
        raise ValueError(
            f"original is {tuple(original.shape)} {original.dtype} but decoded is "
            f"{tuple(decoded.shape)} {decoded.dtype}: decode into the original's shape and dtype"
        )
    want, got = original.reshape(-1), decoded.reshape(-1)
    index = (want.view(torch.int16) != got.view(torch.int16)).nonzero().squeeze(1)
    value = want[index]
    if not index.numel():
        return Misfits(index, value, 0.0, 0.0)
    exact = value.double()
    error = (got[index].double() - exact).abs()
    # A negative zero that lost its sign is a misfit of error 0.
    relative = torch.where(error == 0, 0.0, error / exact.abs())
    return Misfits(index, value, float(error.max()), float(relative.max()))


def misfits_of(original: Tensor, nested: NestedTensor) -> Misfits:
    """``find_misfits(original, decode_full(nested))`` without a second full-size weight."""
    columns = original.shape[-1]
    flat = original.reshape(-1, columns)
    found = [Misfits(torch.empty(0, dtype=torch.int64), flat.new_empty(0), 0.0, 0.0)]
    for rows in row_chunks(flat):
        part = find_misfits(flat[rows], decode_full(nested.rows(rows)))
        if part.count:
            index = part.index + rows.start * columns
            found.append(Misfits(index, part.value, part.max_abs_error, part.max_rel_error))
    return Misfits(
        torch.cat([part.index for part in found]),
        torch.cat([part.value for part in found]),
        max(part.max_abs_error for part in found),
        max(part.max_rel_error for part in found),
    )


def apply_misfits(out: Tensor, misfits: Misfits) -> None:
    """Patch a decoded weight in place; ``out`` is contiguous and of the values' dtype."""
    out.view(-1)[misfits.index] = misfits.value
