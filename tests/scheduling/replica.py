"""A small replica for tests: a block pool and the memory of two ranks, driven by one manager.

The ranks know nothing of ledgers and policies. They execute step commands on what their units
hold, and raise :class:`CorruptionError` as soon as an order would damage weights or KV blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dps_ray.commands import BlockMove, RestoreTask, StepCommand
from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.layers import LayerSegments
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.policy import Pressure, SwitchLimits
from dps_ray.scheduling.retry import RetryLimits
from dps_ray.scheduling.sum_manager import SumManager

LIMITS = SwitchLimits(1.0, 0.6, 2.0, 0.0)
"""Defaults of the engine, with a dwell long enough to see."""

ZEROED, KV, PARTIAL = "zeroed", "kv", "partial"


class CorruptionError(AssertionError):
    """An order that would damage memory."""


@dataclass
class Rank:
    """What one rank's units hold: a segment number, or one of the words above."""

    contents: list[int | str]
    spans: tuple[tuple[int, int], ...] = ()
    """First and last segment of each layer that returns ahead of the others."""
    copies: dict[int, RestoreTask] = field(default_factory=dict)
    """Restores in progress, by epoch."""

    def execute(self, command: StepCommand, written: set[int]) -> None:
        """Obey ``command``, then write KV blocks into the units ``written``."""
        for task in command.cancel:
            self.copies.pop(task.epoch, None)
        copying = {task.unit for task in self.copies.values()}
        for unit in command.zero:
            if unit in copying:
                raise CorruptionError(f"unit {unit} is zeroed under a running copy")
            self.contents[unit] = ZEROED
        for task in command.restore:
            if task.unit in command.zero or task.unit in copying:
                raise CorruptionError(
                    f"unit {task.unit} is restored while something else writes it"
                )
            if self.contents[task.unit] == task.segment or task.epoch in self.copies:
                raise CorruptionError(f"{task} repeats a restore")
            self.copies[task.epoch] = task
            self.contents[task.unit] = PARTIAL
        for unit in written:
            if self.contents[unit] not in (ZEROED, KV):
                raise CorruptionError(f"KV is written over {self.contents[unit]!r} in unit {unit}")
            self.contents[unit] = KV
        if command.mode is Mode.FULL and {*self.contents} != {*range(len(self.contents))}:
            raise CorruptionError(f"a full pass would read {self.contents}")
        for layer in command.full_layers:
            first, last = self.spans[layer]
            if not {*range(first, last + 1)} <= {*self.contents}:
                raise CorruptionError(f"layer {layer} would read {self.contents}")

    def finish(self, task: RestoreTask) -> None:
        """Complete a copy, unless it was cancelled."""
        if self.copies.pop(task.epoch, None) is not None:
            self.contents[task.unit] = task.segment


class Replica:
    """Pool, ranks and a settable clock around the manager under test."""

    def __init__(
        self,
        limits: SwitchLimits,
        *,
        units: int = 4,
        blocks_per_unit: int = 3,
        base_blocks: int = 10,
        binding: str = "fixed",
        pin: Pin = Pin.AUTO,
        retry: RetryLimits | None = None,
        layers: LayerSegments | None = None,
        ledger_type: type[UnitLedger] = UnitLedger,
        manager_type: type[SumManager] = SumManager,
    ) -> None:
        self.now_s = 0.0
        self.base_blocks = base_blocks
        self.base_used = 0
        self.visible = {unit: False for unit in range(units)}
        self.live: list[int] = [0] * units
        self.fresh: list[int] = []
        """Units in which the coming step writes a newly allocated block, one entry a block."""
        spans = layers.spans if layers is not None else ()
        self.ranks = [Rank(list(range(units)), spans) for _ in range(2)]
        self.revealed: list[int] = []
        """Units that joined the KV cache since the latest step, in order."""
        self.ledger = ledger_type(
            units,
            blocks_per_unit,
            binding=binding,  # type: ignore[arg-type]
            in_order=layers is not None,
        )
        self.manager = manager_type(
            self.ledger,
            limits,
            self,
            clock=lambda: self.now_s,
            pin=pin,
            retry=retry,
            layers=layers,
        )

    def reveal_unit(self, unit: int) -> None:
        assert not self.visible[unit], f"unit {unit} is revealed twice"
        self.visible[unit] = True
        self.revealed.append(unit)

    def hide_unit(self, unit: int) -> None:
        assert self.visible[unit], f"unit {unit} is hidden twice"
        assert self.live[unit] == 0, f"unit {unit} is hidden with live blocks"
        self.visible[unit] = False

    @property
    def free_base_blocks(self) -> int:
        return self.base_blocks - self.base_used

    def move_to_base(self, unit: int, limit: int) -> list[BlockMove]:
        raise AssertionError(f"{limit} blocks of unit {unit} move although compaction is off")

    def save_prefixes(self, units: Sequence[int], limit: int) -> dict[int, list[BlockMove]]:
        raise AssertionError(f"{limit} prefixes of {units} move although that is off")

    @property
    def used_blocks(self) -> int:
        return self.base_used + sum(self.live)

    def allocate(self, count: int) -> list[int | None] | None:
        """Take ``count`` blocks, base first; returns each block's unit, ``None`` for base."""
        base_free = self.base_blocks - self.base_used
        if count > base_free + self.manager.obtainable_blocks:
            return None
        elastic = max(0, count - base_free)
        assert self.manager.lend_for(elastic), "obtainable blocks could not be lent"
        self.base_used += count - elastic
        taken: list[int | None] = [None] * (count - elastic)
        while elastic:
            unit = self.ledger.pick_unit()
            assert unit is not None
            here = min(elastic, self.ledger.free_blocks(unit))
            self._take(unit, here)
            taken += [unit] * here
            elastic -= here
        return taken

    def touch(self, unit: int) -> None:
        """Take back one free block of ``unit``, as a prefix-cache hit does: it is only read."""
        self._take(unit, 1)
        self.fresh.pop()

    def _take(self, unit: int, count: int) -> None:
        assert self.visible[unit], f"blocks of hidden unit {unit} are allocated"
        self.ledger.allocate(unit, count)
        self.live[unit] += count
        self.fresh += [unit] * count

    def free(self, blocks: list[int | None]) -> None:
        for unit in blocks:
            if unit is None:
                self.base_used -= 1
                continue
            self.ledger.release(unit)
            self.live[unit] -= 1
            if unit in self.fresh:
                self.fresh.remove(unit)

    def step(self, waiting_requests: int = 0, waiting_blocks: int | None = None) -> StepCommand:
        """Plan one step and let both ranks execute it."""
        command = self.manager.plan_step(self.pressure(waiting_requests, waiting_blocks))
        for rank in self.ranks:
            rank.execute(command, set(self.fresh))
        self.fresh.clear()
        self.revealed.clear()
        return command

    def pressure(self, waiting_requests: int = 0, waiting_blocks: int | None = None) -> Pressure:
        return Pressure(self.used_blocks, self.base_blocks, waiting_requests, waiting_blocks)

    def finish(self, task: RestoreTask) -> bool:
        """Complete ``task`` on every rank and report it."""
        for rank in self.ranks:
            rank.finish(task)
        return self.manager.on_restored(task.unit, task.epoch)


def burst(replica: Replica, blocks: int = 22) -> list[int | None]:
    """Take ``blocks`` blocks (all of the replica's by default) and run the step."""
    taken = replica.allocate(blocks)
    assert taken is not None
    replica.step()
    return taken


def calm(replica: Replica, taken: list[int | None]) -> None:
    """Free ``taken`` and let the dwell of ``LIMITS`` pass."""
    replica.free(taken)
    replica.now_s += LIMITS.min_fast_dwell_s
