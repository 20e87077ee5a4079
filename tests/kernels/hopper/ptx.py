"""The few PTX instructions of the kernels' inline assembly, on numpy arrays of registers.

Anything else is refused, so that a kernel with new instructions cannot pass unproved.
"""

import re
from collections.abc import Callable

import numpy as np
import torch

Registers = np.ndarray
"""One 32-bit (or narrower) register per element."""


def run(assembly: str, inputs: list[Registers], results: int) -> list[Registers]:
    """Execute ``assembly`` whose operands are ``results`` outputs, then the inputs."""
    values = {f"${results + i}": register.astype(np.uint32) for i, register in enumerate(inputs)}
    text = re.sub(r"//[^\n]*", "", assembly).strip()
    for statement in text.strip("{} \n").split(";"):
        if statement.strip() and not statement.strip().startswith(".reg"):
            _execute(statement.strip(), values)
    return [values[f"${i}"] for i in range(results)]


def _execute(statement: str, values: dict[str, Registers]) -> None:
    name, operands = statement.split(None, 1)
    split = re.fullmatch(r"\{\s*(\S+)\s*,\s*(\S+)\s*\}\s*,\s*(\S+)", operands)
    if split and name == "mov.b32":
        low, high, source = split.groups()
        values[low], values[high] = values[source] & 0xFFFF, values[source] >> 16
        return
    if name not in _OPERATIONS:
        raise NotImplementedError(f"PTX {statement!r}: teach tests/kernels/hopper/ptx.py {name!r}")
    target, *sources = [operand.strip() for operand in operands.split(",")]
    values[target] = _OPERATIONS[name](*(_value(source, values) for source in sources))


def _value(operand: str, values: dict[str, Registers]) -> Registers:
    return values[operand] if operand in values else np.array(int(operand, 0), np.uint32)


def _prmt(a: Registers, b: Registers, selector: Registers) -> Registers:
    """Byte ``i`` of the result is the one of ``b:a`` that nibble ``i`` of the selector names."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(both.shape, np.uint64)
    for byte in range(4):
        nibble = int(selector) >> 4 * byte & 0xF
        chosen = both >> np.uint64(8 * (nibble & 7)) & np.uint64(0xFF)
        if nibble & 8:  # the sign, eight times
            chosen = (chosen >> np.uint64(7)) * np.uint64(0xFF)
        result |= chosen << np.uint64(8 * byte)
    return result.astype(np.uint32)


def _lop3(a: Registers, b: Registers, c: Registers, table: Registers) -> Registers:
    """Any logic of three operands: bit ``4a + 2b + c`` of the table."""
    result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for row in range(8):
        if int(table) >> row & 1:
            terms = [x if row >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def _halves(convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Registers], Registers]:
    """Convert the two bytes of a 16-bit register to two FP16 halves of a 32-bit one."""

    def apply(pair: Registers) -> Registers:
        codes = np.stack([pair & 0xFF, pair >> 8], axis=-1).astype(np.uint8)
        halves = convert(torch.from_numpy(codes)).view(torch.int16).numpy().view(np.uint16)
        return halves[..., 0].astype(np.uint32) | halves[..., 1].astype(np.uint32) << 16

    return apply


def _shift(left: bool) -> Callable[[Registers, Registers], Registers]:
    return lambda a, by: a << by if left else a >> by


_OPERATIONS: dict[str, Callable[..., Registers]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shl.b32": _shift(left=True),
    "shr.u32": _shift(left=False),
    "shr.b32": _shift(left=False),
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "cvt.rn.f16x2.e4m3x2": _halves(lambda codes: codes.view(torch.float8_e4m3fn).half()),
    "cvt.rn.f16x2.e5m2x2": _halves(lambda codes: codes.view(torch.float8_e5m2).half()),
}
