"""The instrument itself, on kernels whose machine code is known."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.hopper import sass
from tests.kernels.hopper.offline import compile_launches

TILE = (64, 128, 64)


@triton.jit
def product(x, w, y, k, rounds: tl.constexpr, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr):
    row, column, at = tl.arange(0, bm), tl.arange(0, bn), tl.arange(0, bk)
    x_at = x + row[:, None] * k + at[None, :]
    w_at = w + column[:, None] * k + at[None, :]
    total = tl.zeros((bn, bm), tl.float32)
    for start in range(0, k, bk):
        bits = tl.load(w_at + start).to(tl.int16, bitcast=True).to(tl.int32)
        for turn in tl.static_range(rounds):
            # The compiler can neither merge nor narrow these: a shift, a logic operation, a sum.
            bits = (bits ^ (bits >> 3)) + turn + 3
        total = tl.dot(
            bits.to(tl.int16).to(tl.float16, bitcast=True), tl.load(x_at + start).T, total
        )
    tl.store(y + column[:, None] * bm + row[None, :], total)


@triton.jit
def copy(x, y, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(y + at, tl.load(x + at))


def half(*shape):
    return torch.empty(shape, dtype=torch.float16, device="meta")


def compiled(arch=90, rounds=0, **options):
    bm, bn, bk = TILE
    x, w = half(bm, 1024), half(bn, 1024)
    y = torch.empty(bn, bm, device="meta")

    def launch():
        product[(1,)](x, w, y, 1024, rounds=rounds, bm=bm, bn=bn, bk=bk, **options)

    (kernel,) = compile_launches(launch, arch)
    return kernel


@pytest.mark.parametrize(("arch", "instruction"), [(90, "HGMMA"), (80, "HMMA")])
def test_tensor_core_instructions_are_those_of_the_architecture(arch, instruction):
    kernel = compiled(arch)
    assert kernel.has(instruction)
    assert sum(kernel.has(name) for name in sass.MATRIX) == 1
    assert kernel.spills == 0
    assert 64 < kernel.registers <= 255
    assert kernel.constants["bn"] == TILE[1]


@pytest.mark.parametrize(("arch", "copies"), [(90, 1), (80, 2)])
def test_each_operation_on_a_weight_shows_in_the_count(arch, copies):
    """On sm_80 two warps of this tile need the same weights, so each is worked on twice."""
    plain, worked = (compiled(arch, rounds).integer_per_weight(TILE) for rounds in (0, 8))
    assert plain < 2
    # Three a round; unpacking the halves and packing them again takes the rest.
    assert 24 * copies <= worked - plain <= 27 * copies


def test_a_pass_of_an_unrolled_loop_counts_as_several_steps():
    kernel = compiled()
    assert kernel.loop.steps(TILE, kernel.warps) == 1
    bm, bn, bk = TILE
    assert kernel.loop.steps((bm, bn, bk // 2), kernel.warps) == 2


def test_registers_that_do_not_fit_are_reported_as_spills():
    assert compiled(80, maxnreg=64).spills > 0


def test_a_kernel_without_a_product_has_no_main_loop():
    x = half(1024)
    (kernel,) = compile_launches(lambda: copy[(1,)](x, x, block=1024), 90)
    with pytest.raises(ValueError, match="no loop"):
        kernel.has("HGMMA")


LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0020*/                   PRMT R4, R5, 0x5140, R6 ;
        /*0030*/              @!P0 LOP3.LUT R4, R4, 0x7f, RZ, 0xc0, !PT ;
        /*0040*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*0050*/                   HGMMA.64x16x16.F32 R24, R4, gdesc[UR4], R24, gsb0 ;
        /*0060*/              @!P0 BRA `(.L_x_1) ;
        /*0070*/               @P1 BRA `(.L_x_0) ;
        /*0080*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0090*/                   EXIT ;
"""


def test_the_main_loop_is_the_inner_one():
    code, loops = sass.parse(LISTING)
    assert [instruction.name for instruction in code][-1] == "EXIT"
    assert [len(loop.body) for loop in loops] == [5, 7]
    loop = sass.main_loop(loops)
    assert loop.histogram() == {"PRMT": 1, "LOP3": 1, "UIADD3": 1, "HGMMA": 1, "BRA": 1}
    assert loop.count(sass.INTEGER) == 2
    assert loop.steps((16, 64, 16), warps=4) == 1
