"""What the SUM manager asks of the engine's block pool."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from dps_ray.commands import BlockMove


class UnitBlocks(Protocol):
    """The engine's block pool, as the manager sees it.

    The manager tells it of every change of ownership before the change can be acted on, so that
    the pool's free lists and the ledger never disagree.
    """

    def reveal_unit(self, unit: int) -> None:
        """Offer all blocks of ``unit`` for allocation: it belongs to the KV cache now."""

    def hide_unit(self, unit: int) -> None:
        """Withdraw all blocks of ``unit``, none of them live: a residual segment returns.

        Prefix-cache entries that point at them must be dropped first.
        """

    @property
    def free_base_blocks(self) -> int:
        """Free KV blocks outside the units."""

    def move_to_base(self, unit: int, limit: int) -> Sequence[BlockMove]:
        """Give up to ``limit`` live blocks of ``unit`` new ids in base memory.

        Requests and prefix-cache entries follow; the blocks left behind are free and released in
        the ledger. Blocks that something else than a request holds stay.
        """

    def save_prefixes(self, units: Sequence[int], limit: int) -> Mapping[int, Sequence[BlockMove]]:
        """Move up to ``limit`` cached prefix blocks out of ``units``, none of them live.

        Each takes the place of a base block that was used less recently. The newest move first.

        Returns
        -------
        dict of int to moves
            Moves by the unit they leave; units that nothing leaves are not in it.
        """
