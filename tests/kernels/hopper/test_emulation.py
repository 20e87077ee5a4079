"""The interpreter with inline assembly, on kernels whose results are known."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.hopper import ptx
from tests.kernels.hopper.interpreter import interpreted

SPREAD = tl.constexpr("""{
    .reg .b32 t; // each byte becomes the upper half of 16 bits
    prmt.b32 t, $2, 0, 0x1404;
    mov.b32 $0, t;
    prmt.b32 $1, $2, 0, 0x3424;
}""")


@triton.jit
def spread(bytes_):
    return tl.inline_asm_elementwise(SPREAD, "=r,=r,r", [bytes_], tl.float16, True, 4)


@triton.jit
def spread_and_add(x, y, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    halves = spread(tl.load(x + at, mask=at < count, other=0))
    total = tl.sum(halves.to(tl.float32), axis=0)
    tl.store(y + at, halves.to(tl.float32) + total, mask=at < count)


def test_helpers_reductions_and_assembly_run_on_cpu_tensors():
    codes = torch.arange(100, dtype=torch.uint8)
    y = torch.empty(100)
    with interpreted():
        spread_and_add[(2,)](codes, y, 100, block=64)
    halves = (codes.to(torch.int16) << 8).view(torch.float16).float()
    sums = torch.cat([halves[:64].sum().expand(64), halves[64:].sum().expand(36)])
    assert torch.equal(y, halves + sums)


@pytest.mark.parametrize(
    ("statement", "result"),
    [
        ("prmt.b32 $0, $1, $2, 0x5140", 0xC0_04_D0_05),
        ("prmt.b32 $0, $1, $2, 0x00fb", 0x05_05_FF_00),
        ("lop3.b32 $0, $1, $2, 0x80808080, 0xe4", 0x00_00_40_50),
        ("sub.u32 $0, $1, $2", 0x02030405 + 2**32 - 0x8000C0D0),
        ("shl.b32 $0, $1, 4", 0x20304050),
        ("shr.u32 $0, $2, 8", 0x008000C0),
        ("cvt.rn.f16x2.e4m3x2 $0, $3", 0x3C00_B800),
    ],
)
def test_ptx_instructions_follow_their_definition(statement, result):
    registers = [torch.tensor(value).numpy() for value in (0x02030405, 0x8000C0D0, 0x38B0)]
    (found,) = ptx.run(f"{{ {statement}; }}", registers, results=1)
    assert hex(int(found)) == hex(result)


def test_unknown_ptx_is_refused():
    with pytest.raises(NotImplementedError, match="popc"):
        ptx.run("{ popc.b32 $0, $1; }", [torch.tensor(1).numpy()], results=1)
