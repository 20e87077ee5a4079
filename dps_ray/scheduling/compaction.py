"""Which lent units to empty by moving their live KV blocks to base memory.

One request that outlives a burst may hold a single block of a lent unit, and with it the whole
replica in fast mode. Moving that block costs a copy of its bytes; waiting costs precision.
"""

from collections.abc import Mapping


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
