"""Encoding at load time, and the policy that picks a format for each layer."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dps_ray.precision.chunks import row_chunks
from dps_ray.precision.formats import ELIGIBLE_MAX, MAGNITUDE_MAX, SHIFT_MAX, Format
from dps_ray.precision.misfits import Misfits, misfits_of
from dps_ray.precision.nested import NestedTensor, power_of_two
from dps_ray.precision.report import LayerReport

MISFIT_SHARE_MAX = 0.01
"""Above this share of inexact values a format does not fit: a patch list costs ten bytes a value,
and values that far below their row's maximum vanish in fast mode."""

# Below these shifts the largest fast-mode value of a row would overflow the 16-bit type.
_SHIFT_MIN = {torch.float16: -15, torch.bfloat16: -SHIFT_MAX}


def encode(weight: Tensor, fmt: Format | str) -> NestedTensor:
    """Split a weight in the given format; values beyond the format's range saturate.

    Parameters
    ----------
    weight
        [N, K] or [E, N, K], float16 or bfloat16, finite.
    fmt
        Encoding to use, whether or not it is exact.

    Raises
    ------
    TypeError, ValueError
        If dtype or shape is not supported, or some weight is NaN or infinite.
    """
    row_max = _row_max(weight)
    if not bool(row_max.isfinite().all()):
        raise ValueError("weight has a NaN or an infinite value: leave this layer unsplit")
    return _encode(weight, Format(fmt), row_max)


def choose(
    weight: Tensor, name: str, allowed: Sequence[str] = ("e4m3", "e4m3_row", "e5m2")
) -> tuple[NestedTensor | None, LayerReport]:
    """Pick the nested format of one layer from its values and encode it.

    The first exact format in the order of ``allowed`` wins, else the one with fewest misfits.
    For bfloat16 ``e4m3_row`` comes first: a plain cast to FP16 is exact only for
    ``2^-17 <= |w|``, while a shifted row keeps 18 binades below its maximum and has the smallest
    fast-mode error.

    Parameters
    ----------
    weight
        [N, K] or [E, N, K], float16 or bfloat16.
    name
        Name of the layer in the report.
    allowed
        Formats to consider, in order of preference.

    Returns
    -------
    nested, report
        ``nested`` is ``None`` where no format fits; ``report.reason`` says why.

    Raises
    ------
    TypeError, ValueError
        If dtype, shape or a format's name is not supported.
    """
    row_max = _row_max(weight)
    max_abs = float(row_max.max())

    def report(fmt: Format | None, reason: str, **figures: float) -> LayerReport:
        return LayerReport(
            name,
            fmt,
            reason,
            tuple(weight.shape),
            str(weight.dtype).removeprefix("torch."),
            max_abs,
            **figures,  # type: ignore[arg-type]
        )

    if not math.isfinite(max_abs):
        return None, report(None, "has a NaN or an infinite value")
    best: tuple[NestedTensor, Misfits] | None = None
    refused = []
    for fmt in _preference(allowed, weight.dtype):
        if max_abs > ELIGIBLE_MAX.get(fmt, math.inf):
            refused.append(f"max|w| {max_abs:.4g} is above {ELIGIBLE_MAX[fmt]:g} for {fmt}")
            continue
        nested = _encode(weight, fmt, row_max)
        misfits = misfits_of(weight, nested)
        if misfits.count > MISFIT_SHARE_MAX * weight.numel():
            refused.append(f"{misfits.count / weight.numel():.1%} of the values misfit {fmt}")
        elif best is None or misfits.count < best[1].count:
            best = nested, misfits
        if misfits.count == 0:
            break
    if best is None:
        return None, report(None, "; ".join(refused) or "no format is allowed")
    nested, misfits = best
    shift = nested.row_shift
    return nested, report(
        nested.fmt,
        "exact" if misfits.count == 0 else "fewest misfits",
        shift_min=0 if shift is None else int(shift.min()),
        shift_max=0 if shift is None else int(shift.max()),
        misfits=misfits.count,
        max_abs_error=misfits.max_abs_error,
        max_rel_error=misfits.max_rel_error,
    )


def _preference(allowed: Sequence[str], dtype: torch.dtype) -> list[Format]:
    order = [Format(name) for name in allowed]
    if dtype == torch.bfloat16:
        order.sort(key=lambda fmt: fmt is not Format.E4M3_ROW)
    return order


def _row_max(weight: Tensor) -> Tensor:
    """Largest magnitude of each row, float32 of shape [rows]; NaN where a row holds one."""
    if weight.dtype not in _SHIFT_MIN:
        raise TypeError(f"weight is {weight.dtype}: nested formats split float16 and bfloat16")
    if weight.dim() not in (2, 3) or weight.numel() == 0:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: give a filled [N, K] or [E, N, K]"
        )
    columns = weight.shape[-1]
    flat = weight.reshape(-1, columns)
    out = torch.empty(flat.shape[0], dtype=torch.float32, device=weight.device)
    for rows in row_chunks(flat):
        out[rows] = flat[rows].abs().amax(dim=1)
    return out


def _encode(weight: Tensor, fmt: Format, row_max: Tensor) -> NestedTensor:
    upper = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    lower = torch.empty_like(upper)
    shift = _row_shift(row_max, weight.dtype) if fmt is Format.E4M3_ROW else None
    columns = weight.shape[-1]
    flat = weight.reshape(-1, columns)
    for rows in row_chunks(flat):
        part = flat[rows]
        if shift is not None:
            part = part.float() * power_of_two(shift[rows])[:, None]
        bits = part.to(torch.float16).view(torch.int16)
        upper.view(-1, columns)[rows], lower.view(-1, columns)[rows] = _split(bits, fmt)
    if shift is not None:
        shift = shift.to(torch.int8).view(weight.shape[:-1])
    return NestedTensor(fmt, upper, lower, shift, weight.dtype)


def _split(bits: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    sign = (bits >> 8) & 0x80
    magnitude = (bits & 0x7FFF).clamp(max=MAGNITUDE_MAX[fmt])
    if fmt is Format.E5M2:
        biased = magnitude + 0x80
        return (sign | (biased >> 8)).to(torch.uint8), (biased & 0xFF).to(torch.uint8)
    # Round to nearest even on the seven dropped bits; 0x7F would be NaN, so the code saturates.
    code = ((magnitude + 63 + ((magnitude >> 7) & 1)) >> 7).clamp(max=0x7E)
    return (sign | code).to(torch.uint8), (magnitude & 0xFF).to(torch.uint8)


def _row_shift(row_max: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponent ``k`` that puts each row's maximum into (0.875, 1.75]; 0 for a row of zeros."""
    mantissa, exponent = torch.frexp(row_max)
    shift = torch.where(mantissa <= 0.875, 1 - exponent, -exponent)
    return torch.where(row_max == 0, 0, shift).clamp(_SHIFT_MIN[dtype], SHIFT_MAX)
