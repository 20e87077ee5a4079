"""Measuring tiles on the GPU at hand and writing the table's entries for given weights.

    python -m dps_kernels.hopper.autotune 4096x4096 12288x4096 --output tiles.json

writes, for each weight [N, K], the fastest tile per number of tokens. Put the file in place of the
checked-in table, or name it in ``DPS_KERNELS_TILES``. The tests check every entry of the checked-in
one for spills and for the cost of its loop.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from dps_kernels.hopper import arch as archs
from dps_kernels.hopper import dense, tiles
from dps_kernels.hopper.arch import Arch
from dps_kernels.hopper.tiles import Tile
from dps_kernels.planes import K16, Planes

TOKENS = (16, 32, 64, 128, 1024)
"""Entries are made for up to so many tokens; the last one serves all numbers above, too."""

Measure = Callable[[Tile], float]
"""Milliseconds of a tile, or infinity if it does not run."""


def candidates(kind: str, tokens: int, arch: Arch) -> Iterator[Tile]:
    """Give the tiles worth measuring, without those that cannot fit or decode weights twice."""
    bms = (16, 32, 64, 128) if kind == "fp8" else (16, 32, 64, 128, 256)
    most = max(16, triton.next_power_of_2(tokens))
    shapes = product(bms, (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4, 5), (0, 1, 2, 4, 8))
    for bm, bn, bk, warps, stages, splits in shapes:
        tile = Tile(bm, bn, bk, warps, stages, splits)
        if bm > most or bm * 4 < min(most, 256):
            continue  # empty tiles, or the weight read many times
        if bm * bn > 128 * warps * 32 or bn < 16 * warps:
            continue  # sums beyond the registers, or warps without rows
        if arch.sm < 90 and kind != "fp8" and bn < warps * bm:
            continue  # Ampere's warps would share tokens, and each decode the same weights
        if tile.shared_bytes(kind) <= arch.shared_bytes - 1024 and not (
            splits > 1 and tokens > 128
        ):
            yield tile


def fastest(kind: str, tokens: int, arch: Arch, measure: Measure) -> Tile:
    """Give the candidate with the smallest measured time.

    Raises
    ------
    RuntimeError
        If none of them runs.
    """
    times = {tile: measure(tile) for tile in candidates(kind, tokens, arch)}
    best = min(times, key=times.__getitem__)
    if times[best] == float("inf"):
        raise RuntimeError(f"no tile of kernel {kind!r} for {tokens} tokens runs on this GPU")
    return best


def tune(
    rows: int, columns: int, arch: Arch, measure_for: Callable[[str, int], Measure]
) -> dict[str, list[dict[str, int | None]]]:
    """Give the table's entries of one weight, by key.

    Parameters
    ----------
    measure_for
        From kernel and tokens to the clock of its tiles.
    """
    made: dict[str, list[dict[str, int | None]]] = {}
    for full in (True, False):
        for tokens in TOKENS:
            kind = tiles.kind_of(full, tokens, arch)
            tile = fastest(kind, tokens, arch, measure_for(kind, tokens))
            entries = made.setdefault(f"{kind} {rows}x{columns}", [])
            entries.append({"tokens": tokens, **tile._asdict()})
    for entries in made.values():
        entries[-1]["tokens"] = None
    return made


def clock(kind: str, tokens: int, rows: int, columns: int, arch: Arch) -> Measure:
    """Give the clock of one GEMM on the current device, caches cold."""
    device = torch.device("cuda", torch.cuda.current_device())
    # Any code but zero is an encoded weight, whatever its lower byte.
    upper = torch.randint(1, 0x78, (rows, columns), dtype=torch.uint8, device=device)
    lower = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=device)
    planes = Planes(upper, lower if kind == "full" else None, "e4m3", None, K16)
    x = torch.randn(tokens, columns, dtype=torch.float16, device=device)
    out = torch.empty(tokens, rows, dtype=torch.float16, device=device)

    def measure(tile: Tile) -> float:
        splits = tile.splits or tiles.fill(tile, kind, tokens, rows, columns, arch)
        chosen = tile._replace(splits=splits)
        try:
            return float(
                triton.testing.do_bench(
                    lambda: dense.multiply(x, planes, None, out, kind, chosen, arch),
                    quantiles=[0.5],
                )
            )
        except OutOfResources:
            return float("inf")

    return measure


def write(path: Path, made: dict[str, list[dict[str, int | None]]], arch: Arch) -> None:
    """Put entries into a table, which starts as the checked-in one; one line for each tile."""
    table: dict[str, Any] = json.loads((path if path.exists() else tiles.TABLE).read_text())
    table[tiles.generation(arch)].update(made)
    path.write_text(dump(table))


def dump(table: dict[str, dict[str, list[dict[str, int | None]]]]) -> str:
    """Give the table as JSON with one line for each tile."""
    generations = []
    for generation, kinds in table.items():
        lists = []
        for kind, entries in kinds.items():
            lines = ",\n".join(f"   {json.dumps(entry)}" for entry in entries)
            lists.append(f'  "{kind}": [\n{lines}\n  ]')
        generations.append(f' "{generation}": {{\n' + ",\n".join(lists) + "\n }")
    return "{\n" + ",\n".join(generations) + "\n}\n"


def main() -> None:
    """Tune the weights named on the command line on the current CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", nargs="+", metavar="NxK", help="rows x columns of a weight")
    parser.add_argument("--output", type=Path, default=Path("tiles.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: tiles can only be measured on the GPU that will run them")
    arch = archs.of_device(torch.device("cuda", torch.cuda.current_device()))
    for weight in options.weights:
        rows, columns = map(int, weight.split("x"))
        measure_for = partial(clock, rows=rows, columns=columns, arch=arch)
        made = tune(rows, columns, arch, measure_for)
        write(options.output, made, arch)
        print(f"{weight}: {len(made)} kernels written to {options.output}")


if __name__ == "__main__":
    main()
