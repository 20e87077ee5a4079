"""Index of partly used units that answers "which is the fullest" without a search."""


class FullestFirst:
    """Units with at least one used and one free block, grouped by their number of free blocks.

    A bit per non-empty group makes the fullest group one bit operation away, whatever the number
    of units. Within a group the unit that entered first comes first.

    Parameters
    ----------
    blocks_per_unit
        KV blocks of one unit; free counts lie in ``1 .. blocks_per_unit - 1``.
    """

    def __init__(self, blocks_per_unit: int) -> None:
        self._groups: list[dict[int, None]] = [{} for _ in range(blocks_per_unit)]
        self._occupied = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, unit: int, free_blocks: int) -> None:
        """Enter ``unit`` with ``free_blocks`` free blocks."""
        self._groups[free_blocks][unit] = None
        self._occupied |= 1 << free_blocks
        self._size += 1

    def remove(self, unit: int, free_blocks: int) -> None:
        """Take out ``unit``, which was entered with ``free_blocks`` free blocks."""
        group = self._groups[free_blocks]
        del group[unit]
        if not group:
            self._occupied &= ~(1 << free_blocks)
        self._size -= 1

    def fullest(self) -> int | None:
        """Return the unit with the fewest free blocks, or ``None`` where the index is empty."""
        if not self._occupied:
            return None
        fewest = (self._occupied & -self._occupied).bit_length() - 1
        return next(iter(self._groups[fewest]))

    def free_blocks(self, unit: int) -> int | None:
        """Return the count ``unit`` was entered with, or ``None``; searches every group."""
        return next((free for free, group in enumerate(self._groups) if unit in group), None)
