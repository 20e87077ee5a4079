"""The kernels' results in plain torch: for machines without the compiled library. Slow."""

import torch
from torch import Tensor

from dps_kernels.planes import Planes, from_layout, to_layout


def decode(planes: Planes) -> Tensor:
    """Values of the weight as float32, in row-major order."""
    upper = planes.upper.to(torch.int16)
    if planes.lower is None:
        eighths = upper << 8
        # As FP16 bits, E5M2 is the upper half; E4M3 sits one bit lower, below a clear bit.
        bits = eighths if planes.fmt == "e5m2" else (eighths >> 1) & ~0x407F
    elif planes.fmt == "e5m2":
        bits = (upper * 256 + planes.lower) - 0x80
    else:
        parity = planes.lower.to(torch.int16) >> 7
        magnitude = (((upper & 0x7F) - parity) >> 1) & 0x3F
        bits = ((upper & 0x80 | magnitude) << 8) | planes.lower.to(torch.int16)
    values = from_layout(bits.view(torch.float16), planes.layout).float()
    if planes.row_shift is None:
        return values
    shift = planes.row_shift.to(torch.int32)
    scale = ((127 - shift) << 23).view(torch.float32)  # 2^-shift, from its bits
    return values * scale.unsqueeze(-1)


def reconstruct(out: Tensor, planes: Planes) -> None:
    """Write the values in the planes' own order, rounded to ``out.dtype``."""
    out.copy_(to_layout(decode(planes), planes.layout))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in float32, rounded once to ``x.dtype``."""
    offset = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight.float(), offset).to(x.dtype)


def moe(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Gated experts in float32, one at a time."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in topk_ids.unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ w13[expert].T).chunk(2, dim=-1)
        rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        out.index_add_(0, token, rows * topk_weights[token, choice].float()[:, None])
    return out.to(x.dtype)
