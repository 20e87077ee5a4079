"""Nested weights for the tests, encoded by the reference."""

import torch
from dps_kernels import Planes

from dps_ray.precision.encode import encode
from dps_ray.precision.nested import NestedTensor, decode_fast, decode_full

FORMATS = ["e4m3", "e4m3_row", "e5m2"]
DTYPES = [torch.float16, torch.bfloat16]


def normal(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def nested(shape, fmt, dtype, seed=0):
    """A weight of realistic scale, with an outlier row where the format takes one."""
    weight = normal(*shape, dtype=dtype, scale=0.05, seed=seed)
    if fmt == "e4m3_row":
        weight[..., 0, :] *= 100
    return encode(weight, fmt)


def planes(weight: NestedTensor, full: bool) -> Planes:
    lower = weight.lower if full else None
    return Planes(weight.upper, lower, weight.fmt.value, weight.row_shift)


def values(weight: NestedTensor, full: bool) -> torch.Tensor:
    return decode_full(weight) if full else decode_fast(weight)


def bits(tensor):
    return tensor.view(torch.int16)
