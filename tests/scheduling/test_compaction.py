"""Which units are emptied, and that the manager empties them only on the way to full mode."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dps_ray.commands import BlockMove
from dps_ray.modes import Pin
from dps_ray.scheduling.compaction import plan_moves
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.permits import Permits
from dps_ray.scheduling.policy import Pressure, SwitchLimits
from dps_ray.scheduling.states import UnitState
from dps_ray.scheduling.sum_manager import SumManager

lives = st.dictionaries(st.integers(0, 20), st.integers(1, 8), max_size=12)


@given(live=lives, room=st.integers(0, 40), budget=st.integers(0, 20))
def test_moves_stay_within_room_and_budget_and_waste_no_base_block(
    live: dict[int, int], room: int, budget: int
) -> None:
    moves = plan_moves(live, room, budget)
    moved = sum(count for _, count in moves)
    assert moved <= min(room, budget)
    assert len({unit for unit, _ in moves}) == len(moves)
    assert all(1 <= count <= live[unit] for unit, count in moves)
    begun = [(unit, count) for unit, count in moves if count < live[unit]]
    assert begun in ([], moves[-1:]), "only the last unit may be emptied in part"
    assert not begun or moved == budget, "a unit is begun though the budget was not the limit"
    untouched = [blocks for unit, blocks in live.items() if unit not in dict(moves)]
    emptied = [live[unit] for unit, _ in moves]
    assert not emptied or not untouched or max(emptied) <= min(untouched), "not the emptiest"
    if untouched and moved < budget:
        assert min(untouched) > room - moved, "a unit that fits was left"


def test_a_unit_that_needs_more_than_the_budget_empties_over_several_steps() -> None:
    live, steps = {0: 7, 1: 3}, 0
    while live:
        steps += 1
        for unit, count in plan_moves(live, room=20, budget=4):
            live[unit] -= count
            if not live[unit]:
                del live[unit]
    assert steps == 3


class Blocks:
    """A pool with ``room`` free base blocks that moves what it is asked to."""

    def __init__(self, room: int) -> None:
        self.free_base_blocks = room
        self.ledger: UnitLedger
        self.prefixes: dict[int, int] = {}

    def reveal_unit(self, unit: int) -> None: ...

    def hide_unit(self, unit: int) -> None: ...

    def move_to_base(self, unit: int, limit: int) -> list[BlockMove]:
        self.ledger.release(unit, limit)
        self.free_base_blocks -= limit
        return [BlockMove(100 * unit + index, index) for index in range(limit)]

    def save_prefixes(self, units: Sequence[int], limit: int) -> dict[int, list[BlockMove]]:
        moves: dict[int, list[BlockMove]] = {}
        for unit in [each for each in units for _ in range(self.prefixes.get(each, 0))][:limit]:
            self.prefixes[unit] -= 1
            moves.setdefault(unit, []).append(BlockMove(100 * unit + 50, 50))
        return moves


def replica_with_one_live_block(room: int = 10, **options: object) -> tuple[SumManager, Blocks]:
    blocks = Blocks(room)
    ledger = blocks.ledger = UnitLedger(2, 4)
    manager = SumManager(
        ledger, SwitchLimits(1.0, 0.6, 0.0, 0.0), blocks, clock=lambda: 1.0,
        max_moves=options.pop("max_moves", 16), **options,  # type: ignore[arg-type]
    )  # fmt: skip
    assert manager.lend_for(8)
    ledger.allocate(0, 1)
    manager.plan_step(Pressure(11, 10))
    return manager, blocks


def test_one_live_block_moves_and_its_unit_is_restored_in_the_step_after() -> None:
    manager, _ = replica_with_one_live_block()
    assert manager.may_compact
    manager.compact(Pressure(1, 10))
    command = manager.plan_step(Pressure(1, 10))
    assert command.move == (BlockMove(0, 0),)
    assert [task.unit for task in command.restore] == [1], "unit 0 is still being read"
    assert not manager.may_compact
    command = manager.plan_step(Pressure(1, 10))
    assert command.move == ()
    assert [task.unit for task in command.restore] == [0]
    assert manager.counters.blocks_moved == 1


def test_nothing_moves_under_demand_or_a_pin_or_when_compaction_is_off() -> None:
    manager, blocks = replica_with_one_live_block()
    manager.compact(Pressure(7, 10))
    manager.set_pin(Pin.FAST)
    manager.compact(Pressure(1, 10))
    assert blocks.free_base_blocks == 10
    manager, _ = replica_with_one_live_block(max_moves=0)
    assert not manager.may_compact
    assert manager.ledger.state(0) is UnitState.AVAIL


def test_full_base_memory_moves_nothing() -> None:
    manager, _ = replica_with_one_live_block(room=0)
    manager.compact(Pressure(1, 10))
    assert manager.plan_step(Pressure(1, 10)).move == ()


def test_prefixes_take_what_live_blocks_leave_of_the_budget_and_keep_their_unit_a_step() -> None:
    manager, blocks = replica_with_one_live_block(max_moves=3, save_prefixes=True)
    blocks.prefixes = {1: 3}
    moved: list[int] = []
    restored: list[list[int]] = []
    for _ in range(3):
        manager.compact(Pressure(1, 10))
        command = manager.plan_step(Pressure(1, 10))
        moved.append(len(command.move))
        restored.append([task.unit for task in command.restore])
    assert moved == [3, 1, 0]
    assert restored == [[], [0], [1]], "a unit that blocks leave is still being read"
    assert (manager.counters.blocks_moved, manager.counters.prefixes_saved) == (1, 3)


def test_prefixes_stay_while_the_fleet_gives_no_permit_to_restore() -> None:
    manager, blocks = replica_with_one_live_block(save_prefixes=True)
    blocks.prefixes = {1: 3}
    manager.set_permits(Permits(restore=False))
    manager.compact(Pressure(1, 10))
    assert blocks.prefixes == {1: 3}
