"""Which lent units to empty by moving their live KV blocks to base memory.

One request that outlives a burst may hold a single block of a lent unit, and with it the whole
replica in fast mode. Moving that block costs a copy of its bytes; waiting costs precision.
"""

from collections.abc import Mapping

from dps_ray.scheduling.counters import Counters
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.orders import PendingOrders
from dps_ray.scheduling.states import UnitState
from dps_ray.scheduling.unit_blocks import UnitBlocks


def plan_moves(live_blocks: Mapping[int, int], room: int, budget: int) -> list[tuple[int, int]]:
    """Choose units and how many blocks to move out of each, the emptiest unit first.

    A unit that base memory has no room for is left alone, and every fuller one with it: moving
    part of it would use up base blocks and free nothing. One that only exceeds the budget is begun,
    and is the emptiest at the next step.

    Parameters
    ----------
    live_blocks
        Live KV blocks by unit, at least one each.
    room
        Free base blocks.
    budget
        Blocks that may move in one step.

    Returns
    -------
    list of (unit, blocks)
    """
    moves = []
    for blocks, unit in sorted((blocks, unit) for unit, blocks in live_blocks.items()):
        if blocks > room or budget <= 0:
            break
        count = min(blocks, budget)
        moves.append((unit, count))
        room -= count
        budget -= count
    return moves


class Compaction:
    """Moves blocks out of lent units that the policy would restore.

    Parameters
    ----------
    ledger, orders, counters, blocks
        The manager's own.
    max_moves
        KV blocks that one step may move; 0 turns compaction off.
    save_prefixes
        Move cached prefixes out of free units too, which their restore would wipe.
    """

    def __init__(
        self,
        ledger: UnitLedger,
        orders: PendingOrders,
        counters: Counters,
        blocks: UnitBlocks,
        *,
        max_moves: int,
        save_prefixes: bool,
    ) -> None:
        self._ledger = ledger
        self._orders = orders
        self._counters = counters
        self._blocks = blocks
        self._max_moves = max_moves
        self._save_prefixes = save_prefixes

    @property
    def may_move(self) -> bool:
        """Whether there could be anything to do: lent units hold blocks worth moving."""
        lent = self._ledger.count(UnitState.AVAIL) + self._ledger.count(UnitState.FULL)
        if self._save_prefixes:
            lent += self._ledger.count(UnitState.FREE)
        return bool(self._max_moves and lent)

    def run(self, *, restores_follow: bool) -> None:
        """Order one step's moves: live blocks of the emptiest units, then cached prefixes.

        Parameters
        ----------
        restores_follow
            Free units will be restored now. Otherwise their prefixes are best left where they are.
        """
        room, budget = self._blocks.free_base_blocks, self._max_moves
        for unit, count in plan_moves(self._ledger.live_blocks(), room, budget):
            moves = self._blocks.move_to_base(unit, count)
            if moves:
                budget -= len(moves)
                self._orders.moved(unit, moves)
                self._counters.blocks_moved += len(moves)
        if not (self._save_prefixes and restores_follow):
            return
        saved = self._blocks.save_prefixes(self._ledger.restorable_units(), budget)
        for unit, moves in saved.items():
            self._orders.moved(unit, moves)
            self._counters.prefixes_saved += len(moves)
