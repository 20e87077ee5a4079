"""The decoders' PTX, executed instruction by instruction on every pair of bytes.

The interpreter runs no PTX, so that its tests do not see these strings; a GPU is not needed to know
what seven integer instructions do.
"""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from dps_kernels.hopper import decode

from dps_ray.precision import nested
from dps_ray.precision.formats import Format


def prmt(a, b, selector):
    b = np.broadcast_to(b, a.shape).copy()
    pool = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1)
    picked = [pool[:, (int(selector) >> 4 * byte) & 7] for byte in range(4)]
    return np.stack(picked, 1).copy().view(np.uint32)[:, 0]


def lop3(a, b, c, table):
    out = np.zeros_like(a)
    for row in range(8):
        if int(table) >> row & 1:
            terms = [v if row >> place & 1 else ~v for v, place in ((a, 2), (b, 1), (c, 0))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def e4m3x2(pair):
    codes = torch.from_numpy(np.ascontiguousarray(pair).view(np.uint8).reshape(-1, 2).copy())
    halves = codes.view(torch.float8_e4m3fn).to(torch.float16)
    return halves.numpy().view(np.uint32)[:, 0]


OPERATIONS = {
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "sub.u32": lambda a, b: a - b,
    "cvt.rn.f16x2.e4m3x2": e4m3x2,
}


def execute(ptx, upper, lower):
    """Run PTX on arrays of registers; gives the 16-bit results $0 to $3."""
    registers = {"$4": upper, "$5": lower}
    for line in ptx.value.strip("{} \n").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        name, operands = line.split(maxsplit=1)
        if name == "mov.b32":
            halves, source = re.fullmatch(r"\{(.*)\}, (\S+)", operands.strip()).groups()
            both = registers[source].view(np.uint16).reshape(-1, 2)
            registers.update(zip(halves.split(", "), both.T, strict=True))
            continue
        target, *sources = (text.strip() for text in operands.split(","))
        registers[target] = OPERATIONS[name](
            *(registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources)
        )
    return [registers[f"${i}"] for i in range(4)]


def run(ptx, upper, lower):
    words = [p.numpy().reshape(-1).view(np.uint32) for p in (upper, lower)]
    halves = np.stack(execute(ptx, *words), 1).view(np.int16)
    return torch.from_numpy(halves.reshape(upper.shape).copy())


@pytest.fixture(scope="module")
def every_pair():
    pairs = torch.arange(65536, dtype=torch.int32).view(256, 256)
    shuffled = pairs.flatten()[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]
    return (shuffled >> 8).to(torch.uint8), (shuffled & 0xFF).to(torch.uint8)


def expected(upper, lower, fmt, full):
    weight = nested.NestedTensor(fmt, upper[None], lower[None], None, torch.float16)
    values = nested.decode_full(weight) if full else nested.decode_fast(weight)
    return values[0]


@pytest.mark.parametrize(
    ("ptx", "fmt"), [(decode.FULL_E4M3, Format.E4M3), (decode.FULL_E5M2, Format.E5M2)]
)
def test_full_decoder_gives_the_reference_bits(every_pair, ptx, fmt):
    upper, lower = every_pair
    if fmt is Format.E4M3:
        valid = (upper & 0x7F) >= (lower >> 7)  # a code below its parity bit is never encoded
    else:
        valid = ((upper.to(torch.int16) & 0x7F) << 8 | lower) >= 0x80
    upper, lower = upper[valid], lower[valid]
    cut = len(upper) // 4 * 4
    upper, lower = upper[:cut], lower[:cut]
    assert cut >= 65536 - 256
    assert torch.equal(run(ptx, upper, lower), expected(upper, lower, fmt, True).view(torch.int16))


@pytest.mark.parametrize(
    ("ptx", "fmt", "scale"),
    [
        (decode.FAST_E4M3, Format.E4M3, 1),
        (decode.FAST_E4M3_SM89, Format.E4M3, 256),
        (decode.FAST_E5M2, Format.E5M2, 1),
    ],
)
def test_fast_decoder_gives_the_reference_values(every_pair, ptx, fmt, scale):
    upper, lower = every_pair
    largest = 0x7E if fmt is Format.E4M3 else 0x7B
    upper = torch.where(upper & 0x7F > largest, 0, upper)  # no encoder makes a NaN
    want = (expected(upper, lower, fmt, False).float() * scale).to(torch.float16)
    assert torch.equal(run(ptx, upper, lower), want.view(torch.int16))
