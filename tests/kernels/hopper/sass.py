"""Reading machine code: what the main loop of a compiled Triton kernel costs.

*Integer operations per weight* is the number of vector-ALU integer instructions in the body of the
main loop (`INTEGER`, every variant, predicated or not), times the threads of the block, divided by
the weights of the tile that one pass of the body multiplies. Address arithmetic, loop control and
register moves on the vector ALU are in the count, since they take the same issue slots, and so are
conversions between formats, which can stand in for integer work. The uniform datapath (`UIADD3`,
`ULOP3`, ...) and floating-point arithmetic are not.
"""

import re
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

# fmt: off
INTEGER = frozenset({
    "BMSK", "BREV", "F2F", "F2FP", "F2I", "FLO", "I2F", "I2FP", "IABS", "IADD", "IADD3", "IDP",
    "IMAD", "IMNMX", "IMUL", "ISETP", "LEA", "LOP", "LOP3", "MOV", "POPC", "PRMT", "SEL", "SGXT",
    "SHF", "SHL", "SHR", "VABSDIFF", "VABSDIFF4", "VIADD", "VIADDMNMX", "VIMNMX",
})
# fmt: on
MATRIX = ("HGMMA", "QGMMA", "HMMA", "QMMA")
LOCAL = ("LDL", "STL")

_LABEL = re.compile(r"^(\.L_\w+):")
_CODE = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*([^;]*);"
)
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_WARPGROUP_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)")
_WARP_SHAPE = re.compile(r"\.(16)(8)(8|16|32)\b")


class Instruction(NamedTuple):
    """One line of machine code."""

    name: str
    suffix: str
    operands: str

    def products(self) -> tuple[int, int]:
        """Multiply-adds of a matrix instruction and the warps that execute it together."""
        if shape := _WARPGROUP_SHAPE.search(self.suffix):
            warps = 4
        elif shape := _WARP_SHAPE.search(self.suffix):
            warps = 1
        else:
            raise ValueError(f"{self.name}{self.suffix} names no shape that is known here")
        rows, columns, depth = map(int, shape.groups())
        return rows * columns * depth, warps


class Loop(NamedTuple):
    """The instructions from a label to the branch back to it."""

    start: int
    end: int
    body: tuple[Instruction, ...]

    def count(self, names: Collection[str]) -> int:
        """Instructions of these names, all variants."""
        return sum(instruction.name in names for instruction in self.body)

    def histogram(self) -> Counter[str]:
        """Instructions by name."""
        return Counter(instruction.name for instruction in self.body)

    def steps(self, tile: tuple[int, int, int], warps: int) -> float:
        """Tiles of ``(BM, BN, BK)`` that ``warps`` warps multiply in one pass: > 1 if unrolled."""
        total = 0.0
        for instruction in self.body:
            if instruction.name in MATRIX:
                products, together = instruction.products()
                total += products * warps / together
        rows, columns, depth = tile
        return total / (rows * columns * depth)


def parse(listing: str) -> tuple[list[Instruction], list[Loop]]:
    """Give the instructions of an ``nvdisasm -c`` listing and its loops, shortest first."""
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    spans: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(code)
        elif found := _CODE.search(line):
            code.append(Instruction(*found.groups()))
            target = _TARGET.search(found[3])
            if found[1] == "BRA" and target and target[1] in labels:
                spans.append((labels[target[1]], len(code)))
    spans.sort(key=lambda span: span[1] - span[0])
    return code, [Loop(start, end, tuple(code[start:end])) for start, end in spans]


def main_loop(loops: list[Loop]) -> Loop:
    """Of the innermost loops with matrix instructions, the one with the most of them."""
    inner: list[Loop] = []
    for loop in loops:
        around = any(loop.start <= other.start and other.end <= loop.end for other in inner)
        if loop.count(MATRIX) and not around:
            inner.append(loop)
    if not inner:
        raise ValueError("no loop of the kernel holds a matrix instruction")
    return max(inner, key=lambda loop: loop.count(MATRIX))
