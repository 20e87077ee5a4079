"""Which precision stands behind each KV block: what wrote it, and what it was computed from."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dps_ray.modes import Mode


@dataclass(frozen=True, slots=True)
class Written:
    """What one step computes for one request."""

    blocks: Sequence[int]
    """Ids of the blocks it writes to."""
    previous: Sequence[int] | None
    """Ids of the blocks that hold the token before the first one computed, one a group of layers
    that still has it (a sliding window may have dropped it); ``None`` at the start."""


def worth_noting(
    mode: Mode, starts: Iterable[tuple[str, int]], tokens: Mapping[str, int], window_tokens: int
) -> Iterator[tuple[str, int]]:
    """Give those of ``starts`` whose part of a step ``BlockPrecision.note_step`` must hear of.

    A full pass that stays within blocks which earlier tokens have begun leaves their marks as they
    are.

    Parameters
    ----------
    mode
        Of the step.
    starts, tokens
        Each request's name and first token in the step; by name, how many follow from it on.
    window_tokens
        A common divisor of all groups' block sizes: what stays within such a window, and does not
        begin it, does so in the blocks of every group.
    """
    for name, start in starts:
        if mode is Mode.FAST or not 0 < start % window_tokens <= window_tokens - tokens[name]:
            yield name, start


class BlockPrecision:
    """Tells KV blocks that are full precision throughout from all others.

    A block is full when every token in it was computed in full mode and so was every token before
    it: keys and values of a token depend on the whole context, so what follows a fast prefix is
    not full either, whichever mode computed it. A block that was given out and not written yet is
    not full: the mode of the step that will write it is decided after a prefix can be found in it.
    Nor is what follows tokens of which no block is left to tell: nobody knows what made them.

    The null block, which stands in tables where there is nothing, is none of these blocks.
    """

    def __init__(self) -> None:
        self._lower: dict[int, Literal["unwritten", "fast"]] = {}

    def is_full(self, block: int) -> bool:
        """Whether full precision stands behind ``block``, which holds tokens."""
        return block not in self._lower

    def given_out(self, blocks: Iterable[int]) -> None:
        """Forget what the blocks held: a request is about to write them."""
        for block in blocks:
            self._lower[block] = "unwritten"

    def moved(self, source: int, target: int) -> None:
        """Carry the precision of ``source`` over to the block its contents go to."""
        lower = self._lower.get(source)
        if lower is None:
            self._lower.pop(target, None)
        else:
            self._lower[target] = lower

    def note_step(self, mode: Mode, written: Iterable[Written]) -> None:
        """Take in what a step computes, once its mode is decided."""
        for piece in written:
            fast = mode is Mode.FAST or self._follows_fast(piece.previous)
            for block in piece.blocks:
                if fast:
                    self._lower[block] = "fast"
                elif self._lower.get(block) == "unwritten":
                    del self._lower[block]

    def _follows_fast(self, previous: Sequence[int] | None) -> bool:
        if previous is None:
            return False
        return not previous or any(self._lower.get(block) == "fast" for block in previous)
