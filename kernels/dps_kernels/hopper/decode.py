"""Byte planes to FP16, in registers: what every Triton GEMM on nested weights does in its loop.

Planes are stored in the ``k16`` layout: ``phys[4t+2j1+j0] = logical[8j1+2t+j0]`` in 16 columns.
Thread ``t`` of a tensor-core fragment needs columns 2t, 2t+1, 2t+8 and 2t+9 of a row, which that
order makes four adjacent bytes: one register, decoded four weights at a time by the PTX here, whose
two results are the fragment. Bringing the columns back into logical order is then only a renaming.

``SM`` is the compute capability compiled for. 0 selects plain Triton operations with the same
results, for the interpreter, which runs no PTX.
"""

import triton
import triton.language as tl

# Operands: $0 and $1 the results, then the upper bytes and, in full mode, the lower bytes.

# Four codes at once. The magnitude of a code is never below its parity bit, so that no byte borrows
# from its neighbour; without its sign, no byte leaves a one where its own bit 6 must be clear.
FULL_E4M3 = tl.constexpr("""{
    .reg .b32 parity, magnitude, high;
    shr.u32 parity, $3, 7;
    and.b32 parity, parity, 0x01010101;
    and.b32 magnitude, $2, 0x7f7f7f7f;
    sub.u32 magnitude, magnitude, parity;
    shr.u32 magnitude, magnitude, 1;
    lop3.b32 high, $2, magnitude, 0x80808080, 0xe4;
    prmt.b32 $0, $3, high, 0x5140;
    prmt.b32 $1, $3, high, 0x7362;
}""")

FULL_E5M2 = tl.constexpr("""{
    .reg .b32 first, second;
    prmt.b32 first, $3, $2, 0x5140;
    prmt.b32 second, $3, $2, 0x7362;
    sub.u32 $0, first, 0x00800080;
    sub.u32 $1, second, 0x00800080;
}""")

# An FP16 half is the code's sign and top six bits in one byte, its last bit on top of the other.
FAST_E4M3 = tl.constexpr("""{
    .reg .b32 magnitude, high, low;
    and.b32 magnitude, $2, 0x7f7f7f7f;
    shr.u32 magnitude, magnitude, 1;
    lop3.b32 high, $2, magnitude, 0x80808080, 0xe4;
    shl.b32 low, $2, 7;
    and.b32 low, low, 0x80808080;
    prmt.b32 $0, low, high, 0x5140;
    prmt.b32 $1, low, high, 0x7362;
}""")

# The conversion of SM 8.9 and later gives the code's own value, 2^8 times the weight.
FAST_E4M3_SM89 = tl.constexpr("""{
    .reg .b16 first, second;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}""")

FAST_E5M2 = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x1404;
    prmt.b32 $1, $2, 0, 0x3424;
}""")


@triton.jit
def decode_full(upper, lower, E5M2: tl.constexpr, SM: tl.constexpr):
    """FP16 weights from both bytes, in the order of the bytes."""
    if SM == 0:
        high = upper.to(tl.uint16)
        low = lower.to(tl.uint16)
        if E5M2:
            bits = (high << 8 | low) - 0x80
        else:
            magnitude = ((high & 0x7F) - (low >> 7)) >> 1
            bits = (high & 0x80 | magnitude) << 8 | low
        return bits.to(tl.float16, bitcast=True)
    PTX: tl.constexpr = FULL_E5M2 if E5M2 else FULL_E4M3
    return tl.inline_asm_elementwise(PTX, "=r,=r,r,r", [upper, lower], tl.float16, True, 4)


@triton.jit
def decode_fast(upper, E5M2: tl.constexpr, SM: tl.constexpr):
    """FP16 weights from the upper byte alone, in the order of the bytes; see ``unscale``."""
    if SM == 0:
        high = upper.to(tl.uint16)
        if E5M2:
            bits = high << 8
        else:
            bits = (high & 0x80) << 8 | (high & 0x7F) << 7
        return bits.to(tl.float16, bitcast=True)
    CODE: tl.constexpr = FAST_E4M3_SM89 if SM >= 89 else FAST_E4M3
    PTX: tl.constexpr = FAST_E5M2 if E5M2 else CODE
    return tl.inline_asm_elementwise(PTX, "=r,=r,r", [upper], tl.float16, True, 4)


@triton.jit
def logical_k(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of a ``k16`` tile [ROWS, COLUMNS] in logical order; no instruction in a GEMM."""
    groups = tile.reshape(ROWS, COLUMNS // 16, 4, 2, 2)
    return groups.permute(0, 1, 3, 2, 4).reshape(ROWS, COLUMNS)


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

    In fast mode ``lower`` is not looked at, and sums over the result are to be unscaled.
    """
    if FULL:
        stored = decode_full(upper, lower, E5M2, SM)
    else:
        stored = decode_fast(upper, E5M2, SM)
    return logical_k(stored, ROWS, COLUMNS)


@triton.jit
def unscale(acc, E5M2: tl.constexpr, FULL: tl.constexpr, SM: tl.constexpr):
    """Undo, on sums, the 2^8 between an E4M3 code's value and its weight (SM 8.9 and later)."""
    if FULL or E5M2 or SM < 89:
        return acc
    return acc * 0.00390625
