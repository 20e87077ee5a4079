"""Byte planes to FP16, in registers: what every Triton GEMM on nested weights does in its loop.

Planes are stored in the ``k16`` layout: ``phys[4t+2j1+j0] = logical[8j1+2t+j0]`` in 16 columns.
Thread ``t`` of a tensor-core fragment needs columns 2t, 2t+1, 2t+8 and 2t+9 of a row, which that
order makes one aligned 32-bit word: loaded as such, decoded four weights at a time by the PTX here,
and its two results are the fragment. Bringing the columns back into logical order only renames
registers. Tiles of bytes would be packed across rows and lie unswizzled in shared memory.

``SM`` is the compute capability compiled for, 80 for 8.0.
"""

import triton
import triton.language as tl

# Operands: $0 to $3 the four weights, $4 the upper bytes and, in full mode, $5 the lower bytes.

# Four codes at once. The magnitude of a code is never below its parity bit, so that no byte borrows
# from its neighbour; without its sign, no byte leaves a one where its own bit 6 must be clear.
FULL_E4M3 = tl.constexpr("""{
    .reg .b32 parity, magnitude, high, first, second;
    shr.u32 parity, $5, 7;
    and.b32 parity, parity, 0x01010101;
    and.b32 magnitude, $4, 0x7f7f7f7f;
    sub.u32 magnitude, magnitude, parity;
    shr.u32 magnitude, magnitude, 1;
    lop3.b32 high, $4, magnitude, 0x80808080, 0xe4;
    prmt.b32 first, $5, high, 0x5140;
    prmt.b32 second, $5, high, 0x7362;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}""")

FULL_E5M2 = tl.constexpr("""{
    .reg .b32 first, second;
    prmt.b32 first, $5, $4, 0x5140;
    prmt.b32 second, $5, $4, 0x7362;
    sub.u32 first, first, 0x00800080;
    sub.u32 second, second, 0x00800080;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}""")

# An FP16 half is the code's sign and top six bits in one byte, its last bit on top of the other.
FAST_E4M3 = tl.constexpr("""{
    .reg .b32 magnitude, high, low, first, second;
    and.b32 magnitude, $4, 0x7f7f7f7f;
    shr.u32 magnitude, magnitude, 1;
    lop3.b32 high, $4, magnitude, 0x80808080, 0xe4;
    shl.b32 low, $4, 7;
    and.b32 low, low, 0x80808080;
    prmt.b32 first, low, high, 0x5140;
    prmt.b32 second, low, high, 0x7362;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}""")

# The conversion of SM 8.9 and later gives the code's own value, 2^8 times the weight.
FAST_E4M3_SM89 = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}""")

FAST_E5M2 = tl.constexpr("""{
    .reg .b32 first, second;
    prmt.b32 first, $4, 0, 0x1404;
    prmt.b32 second, $4, 0, 0x3424;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}""")

FOUR_HALVES = tl.constexpr((tl.float16, tl.float16, tl.float16, tl.float16))


@triton.jit
def decode_full(upper, lower, E5M2: tl.constexpr):
    """Four FP16 tiles from int32 words of both bytes: the first, second, third, fourth weight."""
    PTX: tl.constexpr = FULL_E5M2 if E5M2 else FULL_E4M3
    return tl.inline_asm_elementwise(
        PTX, "=h,=h,=h,=h,r,r", [upper, lower], FOUR_HALVES, is_pure=True, pack=1
    )


@triton.jit
def decode_fast(upper, E5M2: tl.constexpr, SM: tl.constexpr):
    """Four FP16 tiles from int32 words of the upper bytes alone; see ``unscale``."""
    E4M3: tl.constexpr = FAST_E4M3_SM89 if SM >= 89 else FAST_E4M3
    PTX: tl.constexpr = FAST_E5M2 if E5M2 else E4M3
    return tl.inline_asm_elementwise(
        PTX, "=h,=h,=h,=h,r", [upper], FOUR_HALVES, is_pure=True, pack=1
    )


@triton.jit
def weight_tile(
    upper,
    lower,
    E5M2: tl.constexpr,
    FULL: tl.constexpr,
    SM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """FP16 operand [ROWS, COLUMNS] of a ``tl.dot``, columns in logical order.

    ``upper`` and ``lower`` are int32 words [ROWS, COLUMNS / 4] of ``k16`` planes. In fast mode
    ``lower`` is not looked at, and sums over the result are to be unscaled.
    """
    if FULL:
        w00, w01, w10, w11 = decode_full(upper, lower, E5M2)
    else:
        w00, w01, w10, w11 = decode_fast(upper, E5M2, SM)
    words = tl.join(tl.join(w00, w01), tl.join(w10, w11))  # [ROWS, word, j0, j1]
    groups = words.reshape(ROWS, COLUMNS // 16, 4, 2, 2)  # [ROWS, group, t, j0, j1]
    return groups.permute(0, 1, 4, 2, 3).reshape(ROWS, COLUMNS)


@triton.jit
def unscale(acc, E5M2: tl.constexpr, FULL: tl.constexpr, SM: tl.constexpr):
    """Undo, on sums, the 2^8 between an E4M3 code's value and its weight.

    From SM 8.9 on, fast mode multiplies by the codes' own values, in FP16 and in FP8.
    """
    if FULL or E5M2 or SM < 89:
        return acc
    return acc * 0.00390625
