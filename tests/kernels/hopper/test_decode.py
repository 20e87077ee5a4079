"""The decoders on every pair of bytes, instruction by instruction, against the reference ones."""

import pytest
import torch
import triton
import triton.language as tl
from dps_kernels.hopper import decode

from dps_ray.precision import nested
from dps_ray.precision.formats import Format
from tests.kernels.hopper.interpreter import interpreted

LARGEST = {Format.E4M3: 0x7E, Format.E5M2: 0x7B}


@triton.jit
def decode_tile(
    upper,
    lower,
    out,
    E5M2: tl.constexpr,
    FULL: tl.constexpr,
    SM: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    at = row * (K // 4) + tl.arange(0, K // 4)[None, :]
    tile = decode.weight_tile(tl.load(upper + at), tl.load(lower + at), E5M2, FULL, SM, ROWS, K)
    tile = decode.unscale(tile.to(tl.float32), E5M2, FULL, SM).to(tl.float16)
    tl.store(out + row * K + tl.arange(0, K)[None, :], tile)


def k16(plane):
    """``stored[4t+2i+j] = column[8i+2t+j]`` in every 16 columns."""
    return plane.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).reshape(plane.shape).contiguous()


def decoded(upper, lower, fmt, full, sm):
    out = torch.empty(upper.shape, dtype=torch.float16)
    rows, columns = upper.shape
    words = [k16(plane).view(torch.int32) for plane in (upper, lower)]
    with interpreted():
        decode_tile[(1,)](*words, out, fmt is Format.E5M2, full, sm, ROWS=rows, K=columns)
    return out.view(torch.int16)


@pytest.fixture(scope="module")
def every_pair():
    """In an order that puts different bytes side by side."""
    pairs = torch.randperm(65536, generator=torch.Generator().manual_seed(0)).view(256, 256)
    return (pairs >> 8).to(torch.uint8), (pairs & 0xFF).to(torch.uint8)


@pytest.mark.parametrize("fmt", LARGEST)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("sm", [80, 90])
def test_every_encoded_pair_decodes_to_the_reference_bits(every_pair, fmt, full, sm):
    upper, lower = every_pair
    # No encoder makes a NaN, nor a code below its parity bit, nor E5M2 less than half a step.
    valid = (upper & 0x7F) <= LARGEST[fmt]
    if fmt is Format.E4M3:
        valid &= (upper & 0x7F) >= (lower >> 7)
    else:
        valid &= (upper & 0x7F != 0) | (lower >= 0x80)
    assert valid.sum() > 62000
    upper, lower = (
        torch.where(valid, upper, 0),
        torch.where(valid, lower, 0x80 * (fmt is Format.E5M2)),
    )
    weight = nested.NestedTensor(fmt, upper, lower, None, torch.float16)
    expected = nested.decode_full(weight) if full else nested.decode_fast(weight)
    assert torch.equal(decoded(upper, lower, fmt, full, sm), expected.view(torch.int16))
