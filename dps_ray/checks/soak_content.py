"""What every KV block of a soak must contain: one word each, repeated over the block."""

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from dps_ray.checks.soak_point import SoakError
from dps_ray.commands import BlockMove
from dps_ray.scheduling.ledger import UnitLedger


class BlockContents:
    """The truth about all KV blocks, once all planned steps have run."""

    def __init__(self, base_blocks: int, blocks_per_unit: int, units: int) -> None:
        self._base_blocks, self._blocks_per_unit = base_blocks, blocks_per_unit
        self._words = np.zeros(base_blocks + units * blocks_per_unit, dtype=np.uint64)
        self._fresh: dict[int, int] = {}
        """What the next step will write: blocks given out since the latest one, and the word."""
        self._tags = count(1)

    def owned(self, ledger: UnitLedger) -> NDArray[np.intp]:
        """All blocks of the KV cache but the null block, which nobody writes."""
        units = [unit for unit in range(ledger.num_units) if ledger.segment_of(unit) is None]
        return np.concatenate([np.arange(1, self._base_blocks), *map(self._blocks_of, units)])

    def zeroed(self, unit: int) -> None:
        """A unit joins the KV cache."""
        self._words[self._blocks_of(unit)] = 0

    def moved(self, moves: Sequence[BlockMove]) -> None:
        for move in moves:
            self._words[move.target] = self._words[move.source]

    def rewritten(self, blocks: Iterable[int]) -> None:
        """Blocks that the next step writes."""
        self._fresh |= {block: next(self._tags) for block in blocks}

    def cached(self, block: int, word: int) -> None:
        """A block that the next step writes with what its prefix says."""
        self._fresh[block] = word

    def freed(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._fresh.pop(block, None)

    def write(self) -> NDArray[np.intp]:
        """Plan what the step writes; the blocks it writes."""
        written = np.fromiter(self._fresh, dtype=np.intp, count=len(self._fresh))
        self._words[written] = list(self._fresh.values())
        self._fresh.clear()
        return written

    def words(self) -> NDArray[np.uint64]:
        """The word of each block after the latest planned step."""
        return self._words.copy()

    def must_hold(self, block: int, word: int) -> None:
        """Assert what a prefix-cache hit promises."""
        if self._fresh.get(block, int(self._words[block])) != word:
            raise SoakError(f"cached block {block} is hit for a prefix it does not hold")

    def _blocks_of(self, unit: int) -> NDArray[np.intp]:
        start = self._base_blocks + unit * self._blocks_per_unit
        return np.arange(start, start + self._blocks_per_unit)
