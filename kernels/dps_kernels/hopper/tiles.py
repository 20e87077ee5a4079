"""Which tile multiplies which shape: a table per GPU generation, checked in, made by `autotune`."""

from typing import NamedTuple

from dps_kernels.hopper import table
from dps_kernels.hopper.arch import Arch

FP8_FROM_TOKENS = 65
"""Fast mode multiplies in FP8 from here on: below, reading weights decides, and W8A16 needs no
quantised activations."""

MAX_SPLITS = 16
MIN_STEPS = 4  # of the loop, in each split: fewer do not fill the pipeline


class Tile(NamedTuple):
    """One program's share of a GEMM and how it is run."""

    bm: int
    """Tokens."""
    bn: int
    """Rows of the weight."""
    bk: int
    """Columns of one step."""
    warps: int
    stages: int
    """Depth of the software pipeline."""
    splits: int = 0
    """Parts of the sum over K, each a program; 0 fills the GPU."""

    def shared_bytes(self, kind: str, arch: Arch) -> int:
        """Shared memory of the pipeline or of the 16-bit results, but for some words of barriers.

        What is in registers when the tensor cores read it needs a buffer less than there are
        stages: both operands before Hopper, and the decoded weights there, too.
        """
        x, w = {"full": (2, 2), "fast": (2, 1), "fp8": (1, 1)}[kind]
        x_buffers = self.stages - (arch.sm < 90)
        w_buffers = self.stages - (arch.sm < 90 or kind != "fp8")
        pipeline = self.bk * (x_buffers * self.bm * x + w_buffers * self.bn * w)
        return max(pipeline, 2 * self.bm * self.bn)


def kind_of(full: bool, tokens: int, arch: Arch) -> str:
    """Give the kernel: ``full``, ``fast`` (W8A16) or ``fp8`` (W8A8)."""
    if full:
        return "full"
    return "fp8" if arch.fp8 and tokens >= FP8_FROM_TOKENS else "fast"


def lookup(kind: str, tokens: int, rows: int, columns: int, arch: Arch) -> Tile:
    """Give the table's tile for [tokens, columns] x [rows, columns], of this weight or any."""
    kinds = table.kinds_of(generation(arch))
    entries = kinds.get(f"{kind} {rows}x{columns}", kinds[kind])
    fields = next(e for e in entries if e["tokens"] is None or tokens <= e["tokens"])
    return Tile(**{name: value for name, value in fields.items() if name != "tokens"})


def choose(kind: str, tokens: int, rows: int, columns: int, arch: Arch) -> Tile:
    """Give the tile of a dense GEMM, its ``splits`` resolved."""
    tile = lookup(kind, tokens, rows, columns, arch)
    splits = tile.splits or fill(tile, kind, tokens, rows, columns, arch)
    return tile._replace(splits=splits)


def fill(tile: Tile, kind: str, tokens: int, rows: int, columns: int, arch: Arch) -> int:
    """Give the number of splits with which all programs are resident at once."""
    programs = -(-tokens // tile.bm) * -(-rows // tile.bn)
    per_processor = max(1, arch.shared_bytes // (tile.shared_bytes(kind, arch) + 1024))
    resident = arch.processors * min(per_processor, 64 // (4 * tile.warps))
    most = min(MAX_SPLITS, columns // (tile.bk * MIN_STEPS))
    return max(1, min(resident // programs, most))


def generation(arch: Arch) -> str:
    """Give the key of the table: what shares shared memory sizes and instructions."""
    if arch.sm >= 90:
        return "sm90"
    return "sm80" if arch.sm == 80 else "sm89"
