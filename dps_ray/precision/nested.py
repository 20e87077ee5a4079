"""A nested weight and its reference decoders, in plain torch.

The compiled kernels must agree with these functions bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dps_ray.precision.chunks import row_chunks
from dps_ray.precision.formats import Format


@dataclass(frozen=True)
class NestedTensor:
    """A 16-bit weight split in two byte planes.

    Parameters
    ----------
    fmt
        Encoding of the pair of bytes.
    upper
        uint8, shape of the weight: the FP8 code, all that fast mode reads.
    lower
        uint8, same shape: the residual.
    row_shift
        int8, shape of the weight without its last dimension, or ``None``: the planes hold
        ``w * 2**row_shift``.
    dtype
        What decoding returns: ``torch.float16`` or ``torch.bfloat16``.
    """

    fmt: Format
    upper: Tensor
    lower: Tensor
    row_shift: Tensor | None
    dtype: torch.dtype

    def rows(self, rows: slice) -> "NestedTensor":
        """View of some rows as a 2-D weight; rows of all experts are counted through."""
        columns = self.upper.shape[-1]
        return NestedTensor(
            self.fmt,
            self.upper.view(-1, columns)[rows],
            self.lower.view(-1, columns)[rows],
            None if self.row_shift is None else self.row_shift.view(-1)[rows],
            self.dtype,
        )


def decode_full(nested: NestedTensor) -> Tensor:
    """Give back the 16-bit weight from both bytes, in ``nested.dtype``."""
    return _decode(nested, _full_bits)


def decode_fast(nested: NestedTensor) -> Tensor:
    """Give the nested FP8 weight from the upper byte alone, in ``nested.dtype``."""
    return _decode(nested, _fast_bits)


def power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` as float32 for ``-126 <= exponent <= 127``, exact: made from its bits."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _decode(nested: NestedTensor, bits_of: Callable[[NestedTensor], Tensor]) -> Tensor:
    out = torch.empty(nested.upper.shape, dtype=nested.dtype, device=nested.upper.device)
    columns = nested.upper.shape[-1]
    flat = out.view(-1, columns)
    for rows in row_chunks(flat):
        part = nested.rows(rows)
        stored = bits_of(part).view(torch.float16)
        if part.row_shift is not None:
            stored = stored.float() * power_of_two(-part.row_shift.to(torch.int32))[:, None]
        flat[rows] = stored.to(nested.dtype)
    return out


def _full_bits(nested: NestedTensor) -> Tensor:
    upper, lower = nested.upper.to(torch.int16), nested.lower.to(torch.int16)
    if nested.fmt is Format.E5M2:
        return ((upper << 8) | lower) - 0x80
    # The code is the truncated high bits plus its rounding; the lower byte's top bit is the parity
    # of those high bits, so subtracting it removes the rounding without a borrow.
    high = (((upper & 0x7F) - (lower >> 7)) >> 1) & 0x3F
    return (((upper & 0x80) | high) << 8) | lower


def _fast_bits(nested: NestedTensor) -> Tensor:
    upper = nested.upper.to(torch.int16)
    if nested.fmt is Format.E5M2:
        return upper << 8
    # An E4M3 code placed three bits below FP16's exponent is the same number times 2^-8, subnormals
    # included: the exponent biases differ by exactly 8.
    return ((upper & 0x80) << 8) | ((upper & 0x7F) << 7)
