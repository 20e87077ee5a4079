"""Which batches compile everything that serving can launch.

A launch is compiled for its weight, its kernel, its tile, and whether the sum over K is split.
Within the numbers of tokens that one entry of the table serves, more tokens never split more: the
first and the last of them compile both. Experts do not split, but count tokens by the routes that
an expert gets.
"""

from collections.abc import Collection, Iterable

from dps_kernels.hopper import table, tiles
from dps_kernels.hopper.arch import Arch


def token_counts(largest: int, arch: Arch, mixtures: Iterable[tuple[int, int]] = ()) -> list[int]:
    """Give numbers of tokens after which no number up to ``largest`` compiles anything.

    Parameters
    ----------
    largest
        Tokens of the largest batch.
    arch
        The GPU.
    mixtures
        Number of experts and top-k of each layer of experts.

    Returns
    -------
    list
        Ascending, the same for every weight and mode.
    """
    kinds = table.kinds_of(tiles.generation(arch))
    dense = _bounds(arch, (kinds[key] for key in kinds if not key.startswith("moe ")))
    routed = _bounds(arch, (kinds[key] for key in kinds if key.startswith("moe ")))
    ends = {bound * experts // top_k for experts, top_k in mixtures for bound in routed}
    firsts = {1, *(bound + 1 for bound in dense)}
    return sorted(count for count in {largest, *firsts, *dense, *ends} if 1 <= count <= largest)


def _bounds(arch: Arch, lists: Iterable[Collection[table.Entry]]) -> set[int]:
    """Last numbers of tokens that an entry, or a kernel, serves."""
    bounds = {entry["tokens"] for entries in lists for entry in entries}
    fp8 = {tiles.FP8_FROM_TOKENS - 1} if arch.fp8 else set()
    return fp8 | {bound for bound in bounds if bound is not None}
