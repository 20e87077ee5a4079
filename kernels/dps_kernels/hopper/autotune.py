"""Measuring tiles on the GPU at hand and writing the table's entries for given weights.

    python -m dps_kernels.hopper.autotune 4096x4096 128x1536x2048x8 --output tiles.json

writes, for each weight [N, K], the fastest tile per number of tokens; for routed experts, given as
[E, 2I, H] and their top-k, per number of routes that an expert gets. Some 900 tiles are compiled
for a weight. Put the file in place of the checked-in table, or name it in ``DPS_KERNELS_TILES``.
The tests check every entry of the checked-in one for spills, for shared memory and for the cost of
its loop.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
from triton.runtime.errors import OutOfResources

from dps_kernels.hopper import arch as archs
from dps_kernels.hopper import dense, moe, table, tiles
from dps_kernels.hopper.arch import Arch
from dps_kernels.hopper.tiles import Tile
from dps_kernels.planes import K16, Planes

TOKENS = (16, 32, 64, 128, 1024)
"""Entries are made for up to so many tokens; the last one serves all numbers above, too."""
ROUTES = (2, 8, 24, 64, 128, 512)
"""The same for routes per expert."""
SPLITS = (0, 1, 2, 3, 4, 6, 8, 12)
"""Of a dense GEMM: tiles are compared with the first, the others are tried with the best tile."""

Measure = Callable[[Tile], float]
"""Milliseconds of a tile, or infinity if it does not run."""
MeasureFor = Callable[[str, int], Measure]
"""From a kernel and a number of tokens (or of routes per expert) to the clock of its tiles."""
Entries = dict[str, list[dict[str, int | None]]]
"""Part of the table: tiles by key."""


def candidates(kind: str, tokens: int, arch: Arch, splits: int) -> Iterator[Tile]:
    """Give the tiles worth measuring, without those that cannot fit or decode weights twice."""
    most = max(16, triton.next_power_of_2(tokens))
    shapes = product((16, 32, 64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4))
    for bm, bn, bk, warps, stages in shapes:
        tile = Tile(bm, bn, bk, warps, stages, splits)
        if bm > most or bm * 4 < min(most, 256):
            continue  # empty tiles, or the weight read many times
        if bm * bn > 128 * warps * 32 or bn < 16 * warps:
            continue  # sums beyond the registers, or warps without rows
        if kind == "fp8" and bm * bn > 64 * warps * 32:
            continue  # FP8 sums are held twice
        if arch.sm < 90 and kind != "fp8" and bn < warps * bm:
            continue  # Ampere's warps would share tokens, and each decode the same weights
        if tile.shared_bytes(kind, arch) <= arch.shared_bytes - 1024:
            yield tile


def fastest(
    kind: str, tokens: int, arch: Arch, measure: Measure, splits: tuple[int, ...] = SPLITS
) -> Tile:
    """Give the candidate with the smallest measured time: first a tile, then its splits.

    Raises
    ------
    RuntimeError
        If none of them runs.
    """
    times = {tile: measure(tile) for tile in candidates(kind, tokens, arch, splits[0])}
    best = min(times, key=times.__getitem__)
    if times[best] == float("inf"):
        raise RuntimeError(f"no tile of kernel {kind!r} for {tokens} tokens runs on this GPU")
    for count in splits[1:]:
        split = best._replace(splits=count)
        times[split] = measure(split)
    return min(times, key=times.__getitem__)


def tune(weight: tuple[int, ...], arch: Arch, measure_for: MeasureFor) -> Entries:
    """Give the table's entries of one weight [N, K], or of experts [E, 2I, H] and top-k, by key."""
    experts = len(weight) == 4
    rows, columns = weight[-3:-1] if experts else weight
    counts, splits, prefix = (ROUTES, (1,), "moe ") if experts else (TOKENS, SPLITS, "")
    made: Entries = {}
    for full in (True, False):
        for count in counts:
            kind = tiles.kind_of(full, count, arch)
            tile = fastest(kind, count, arch, measure_for(kind, count), splits)
            entries = made.setdefault(f"{prefix}{kind} {rows}x{columns}", [])
            entries.append({"tokens": count, **tile._asdict()})
    for entries in made.values():
        entries[-1]["tokens"] = None
    return made


def random_planes(shape: tuple[int, ...], full: bool) -> Planes:
    """Give a weight on the current device."""
    # Any code but zero is an encoded weight, whatever its lower byte.
    upper = torch.randint(1, 0x78, shape, dtype=torch.uint8, device="cuda")
    lower = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    return Planes(upper, lower if full else None, "e4m3", None, K16)


def dense_clock(weight: tuple[int, ...], arch: Arch, kind: str, tokens: int) -> Measure:
    """Give the clock of one GEMM on the current device, caches cold."""
    rows, columns = weight
    planes = random_planes((rows, columns), kind == "full")
    x = torch.randn(tokens, columns, dtype=torch.float16, device="cuda")
    out = torch.empty(tokens, rows, dtype=torch.float16, device="cuda")

    def measure(tile: Tile) -> float:
        splits = tile.splits or tiles.fill(tile, kind, tokens, rows, columns, arch)
        chosen = tile._replace(splits=splits)
        return milliseconds(lambda: dense.multiply(x, planes, None, out, kind, chosen, arch))

    return measure


def moe_clock(weight: tuple[int, ...], arch: Arch, kind: str, routes: int) -> Measure:
    """Give the clock of a layer of experts that get so many routes each on average."""
    experts, gate_up, hidden, top_k = weight
    full = kind == "full"
    w13 = random_planes((experts, gate_up, hidden), full)
    w2 = random_planes((experts, hidden, gate_up // 2), full)
    tokens = -(-routes * experts // top_k)
    x = torch.randn(tokens, hidden, dtype=torch.float16, device="cuda")
    weights, ids = torch.rand(tokens, experts, device="cuda").topk(top_k)

    def measure(tile: Tile) -> float:
        plan = moe.Plan(kind, tile)
        return milliseconds(lambda: moe.routed(x, w13, w2, weights, ids, plan, arch))

    return measure


def milliseconds(launch: Callable[[], object]) -> float:
    """Give the median time of a launch, or infinity if the GPU has no room for it."""
    try:
        return float(triton.testing.do_bench(launch, quantiles=[0.5]))
    except OutOfResources:
        return float("inf")


def write(path: Path, made: Entries, arch: Arch) -> None:
    """Put entries into a table, which starts as the checked-in one; one line for each tile.

    Raises
    ------
    TileTableError
        If the file is there and is no table.
    """
    stock = table.read(str(table.CHECKED_IN))
    old = table.read(str(path), "--output") if path.exists() else stock
    generation = tiles.generation(arch)
    path.write_text(dump({**old, generation: {**old.get(generation, stock[generation]), **made}}))


def dump(generations: dict[str, Entries]) -> str:
    """Give the table as JSON with one line for each tile."""
    parts = []
    for generation, kinds in generations.items():
        lists = []
        for kind, entries in kinds.items():
            lines = ",\n".join(f"   {json.dumps(entry)}" for entry in entries)
            lists.append(f'  "{kind}": [\n{lines}\n  ]')
        parts.append(f' "{generation}": {{\n' + ",\n".join(lists) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def weight_of(text: str) -> tuple[int, ...]:
    """Parse ``NxK`` or ``Ex2IxHxTOP_K``."""
    fields = text.split("x")
    if len(fields) not in (2, 4) or not all(field.isdecimal() for field in fields):
        raise argparse.ArgumentTypeError(f"{text!r}: give NxK, or Ex2IxHxTOP_K for experts")
    return tuple(map(int, fields))


def main() -> None:
    """Tune the weights named on the command line on the current CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "weights", nargs="+", type=weight_of, metavar="NxK|Ex2IxHxTOP_K", help="shape of a weight"
    )
    parser.add_argument("--output", type=Path, default=Path("tiles.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: tiles can only be measured on the GPU that will run them")
    if options.output.exists():
        try:
            table.read(str(options.output), "--output")
        except table.TileTableError as error:
            parser.error(str(error))
    arch = archs.of_device(torch.device("cuda", torch.cuda.current_device()))
    for weight in options.weights:
        clock = moe_clock if len(weight) == 4 else dense_clock
        made = tune(weight, arch, partial(clock, weight, arch))
        write(options.output, made, arch)
        print(f"{'x'.join(map(str, weight))}: {len(made)} kernels written to {options.output}")


if __name__ == "__main__":
    main()
