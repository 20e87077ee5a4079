"""Random histories of one replica, checked against a model that shares no code with the ledger."""

import math
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dps_ray.commands import RestoreTask, StepCommand
from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.layers import LayerSegments
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.permits import Permits
from dps_ray.scheduling.policy import SwitchLimits
from dps_ray.scheduling.retry import RetryLimits
from dps_ray.scheduling.states import UnitState
from dps_ray.scheduling.sum_manager import SumManager

from .replica import Replica

UNITS, BLOCKS_PER_UNIT, BASE_BLOCKS = 4, 3, 10
LAYERS = LayerSegments(((0, 0), (0, 1), (2, 2), (2, 2), (2, 3)))
"""Layers that share segments, and one that lies in two."""
FAST_DWELL_S, FULL_DWELL_S, LOW = 2.0, 1.5, 0.6


class ReplicaMachine(RuleBasedStateMachine):
    """Allocates, frees, steps, restores, fails, pins and waits in any order."""

    ledger_type: ClassVar[type[UnitLedger]] = UnitLedger
    manager_type: ClassVar[type[SumManager]] = SumManager

    @initialize(
        binding=st.sampled_from(["fixed", "any"]),
        high=st.sampled_from([0.8, 1.0]),
        full_dwell_s=st.sampled_from([0.0, FULL_DWELL_S]),
        layers=st.sampled_from([None, LAYERS]),
    )
    def build(
        self,
        binding: str,
        high: float,
        full_dwell_s: float,
        layers: LayerSegments | None,
    ) -> None:
        self.full_dwell_s, self.high = full_dwell_s, high
        self.replica = Replica(
            SwitchLimits(high, LOW, FAST_DWELL_S, full_dwell_s),
            units=UNITS,
            blocks_per_unit=BLOCKS_PER_UNIT,
            base_blocks=BASE_BLOCKS,
            binding=binding,
            retry=RetryLimits(attempts=3, first_pause_s=1.0),
            layers=layers,
            ledger_type=self.ledger_type,
            manager_type=self.manager_type,
        )
        self.manager, self.ledger = self.replica.manager, self.replica.ledger
        self.requests: list[list[int | None]] = []
        self.open: dict[int, RestoreTask] = {}
        self.ended: list[RestoreTask] = []
        self.expected_cancel: list[RestoreTask] = []
        self.last_epoch = 0
        self.lent_since_advance = self.held = False
        self.mode = Mode.FULL
        self.full_layers: tuple[int, ...] = ()
        """Of the latest step, unless something was lent or failed since."""
        self.full_since_s = self.pressed_at_s = -math.inf
        self.pins_since_switch = {Pin.AUTO}

    # -- what the serving engine does -------------------------------------------------------------

    @rule(count=st.integers(0, BASE_BLOCKS + UNITS * BLOCKS_PER_UNIT))
    def allocate(self, count: int) -> None:
        lent_before, pin = len(self.replica.revealed), self.manager.pin
        hidden = [unit for unit, seen in self.replica.visible.items() if not seen]
        free = BASE_BLOCKS + UNITS * BLOCKS_PER_UNIT - self.replica.used_blocks
        blocks = self.replica.allocate(count)
        lent = self.replica.revealed[lent_before:]
        in_full_dwell = self.replica.now_s - self.full_since_s < self.full_dwell_s
        may_lend = pin is not Pin.FULL and not (self.mode is Mode.FULL and in_full_dwell)
        obtainable = free if may_lend else free - len(hidden) * BLOCKS_PER_UNIT
        assert (blocks is not None) == (count <= obtainable)
        assert may_lend or not lent
        if blocks is not None:
            self.requests.append(blocks)
        restoring = set(self.open)
        for unit in lent:
            self._close(unit)
            self.full_layers = ()
            self.pressed_at_s = self.replica.now_s
            self.lent_since_advance = True
        if not restoring <= set(lent):
            assert not set(lent) - restoring, "a backed unit was lent before a restoring one"

    @rule(beyond=st.integers(1, BLOCKS_PER_UNIT + 1))
    def outgrow_free_memory(self, beyond: int) -> None:
        """The smallest allocations that call for a lend."""
        base_free = BASE_BLOCKS - self.replica.base_used
        self.allocate(base_free + self.ledger.kv_free_blocks + beyond)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish_request(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.replica.free(self.requests.pop(index))

    @rule(seconds=st.sampled_from([FAST_DWELL_S / 2, FAST_DWELL_S]))
    def fall_calm(self, seconds: float) -> None:
        """Every request ends and time passes: what it takes for restores to begin."""
        for blocks in self.requests:
            self.replica.free(blocks)
        self.requests.clear()
        self.replica.now_s += seconds
        self.step()

    @rule()
    def storm_passes(self) -> None:
        """A demand for all memory comes and goes; a restore begins in every unit."""
        self.allocate(BASE_BLOCKS + UNITS * BLOCKS_PER_UNIT - self.replica.used_blocks)
        self.step()
        self.fall_calm(FAST_DWELL_S)

    @rule(unit=st.integers(0, UNITS - 1))
    def hit_cached_block(self, unit: int) -> None:
        if self.ledger.free_blocks(unit):
            self.replica.touch(unit)
            self.requests.append([unit])

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.replica.now_s += seconds

    @rule(pin=st.sampled_from([Pin.AUTO, Pin.AUTO, *Pin]))
    def set_pin(self, pin: Pin) -> None:
        self.manager.set_pin(pin)
        self.pins_since_switch.add(pin)

    # -- what the ranks report --------------------------------------------------------------------

    @precondition(lambda self: self.open)
    @rule()
    def fleet_stops_restores(self) -> None:
        self.manager.set_permits(Permits(stop=True))
        assert self.ledger.open_restores == ()
        for unit in list(self.open):
            self._close(unit)
        self.manager.set_permits(Permits())

    @precondition(lambda self: self.open and not self.held)
    @rule(data=st.data(), rank=st.integers(0, 1))
    def one_rank_finishes(self, data: st.DataObject, rank: int) -> None:
        task = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        self.replica.ranks[rank].finish(task)
        if all(rank.contents[task.unit] == task.segment for rank in self.replica.ranks):
            assert self.manager.on_restored(task.unit, task.epoch)
            self.ended.append(self.open.pop(task.unit))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def one_rank_fails(self, data: st.DataObject) -> None:
        task = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        self.replica.ranks[0].copies.pop(task.epoch, None)
        assert self.manager.on_restore_failed(task.unit, task.epoch, "checksum differs")
        assert str(task.segment) in (self.manager.fault or "")
        self._close(task.unit)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), failed=st.booleans())
    def outdated_report_arrives(self, data: st.DataObject, failed: bool) -> None:
        current = [task for task in self.ended if task.unit in self.open]
        task = data.draw(st.sampled_from(current or self.ended))
        if failed:
            assert not self.manager.on_restore_failed(task.unit, task.epoch, "late")
        else:
            assert not self.manager.on_restored(task.unit, task.epoch)

    # -- the step ---------------------------------------------------------------------------------

    @rule(waiting=st.sampled_from([(0, None), (0, 0), (1, None), (1, 2), (3, 30)]))
    def step(self, waiting: tuple[int, int | None] = (0, None)) -> None:
        now_s, revealed = self.replica.now_s, tuple(self.replica.revealed)
        command = self.replica.step(*waiting)
        assert command.zero == revealed, "each unit that joins the KV cache is zeroed once"
        assert list(command.cancel) == self.expected_cancel
        self.expected_cancel.clear()
        for task in command.restore:
            assert task.epoch > self.last_epoch, "an epoch is used twice"
            self.last_epoch = task.epoch
            self.open[task.unit] = task
        if command.restore:
            assert not command.hold, "a restore begins while others stand still"
            self._check_restore_was_allowed(*waiting)
        self.held = command.hold
        assert not self.held or (self.open and self.lent_since_advance), "nothing to hold up"
        if not self.held and self.open and self.lent_since_advance:
            self._check_restore_was_allowed(*waiting)
            self.lent_since_advance = False
        if command.mode is not self.mode:
            self._check_dwell(command.mode)
            self.mode = command.mode
            self.pins_since_switch = {self.manager.pin}
            if command.mode is Mode.FULL:
                self.full_since_s = now_s
            else:
                self.pressed_at_s = now_s
        whole = all(len({*rank.contents} - {*range(UNITS)}) == 0 for rank in self.replica.ranks)
        if self.manager.pin is Pin.FULL and whole and not self.open:
            assert command.mode is Mode.FULL
        if self.manager.pin is Pin.FAST:
            assert command.mode is Mode.FAST
        self._check_layers(command)

    def _check_layers(self, command: StepCommand) -> None:
        if command.mode is Mode.FULL or self.manager.pin is Pin.FAST:
            assert command.full_layers == ()
        elif self.high == 1.0 and self.pins_since_switch == {Pin.AUTO}:
            assert {*self.full_layers} <= {*command.full_layers}, "a layer was lost without a lend"
        self.full_layers = command.full_layers

    def _check_restore_was_allowed(self, waiting: int, waiting_blocks: int | None) -> None:
        if self.manager.pin is Pin.FULL:
            return
        assert self.manager.pin is Pin.AUTO
        assert waiting == 0 or waiting_blocks is not None
        assert self.replica.used_blocks + (waiting_blocks or 0) <= LOW * BASE_BLOCKS
        assert self.replica.now_s - self.pressed_at_s >= FAST_DWELL_S

    def _check_dwell(self, to: Mode) -> None:
        if self.pins_since_switch | {self.manager.pin} != {Pin.AUTO}:
            return
        since_s = self.full_since_s if to is Mode.FAST else self.pressed_at_s
        dwell_s = self.full_dwell_s if to is Mode.FAST else FAST_DWELL_S
        assert self.replica.now_s - since_s >= dwell_s, f"switched to {to} within the dwell"

    def _close(self, unit: int) -> None:
        task = self.open.pop(unit, None)
        if task is not None:
            self.expected_cancel.append(task)
            self.ended.append(task)

    # -- always -----------------------------------------------------------------------------------

    @invariant()
    def books_agree_with_the_pool_and_the_ranks(self) -> None:
        self.manager.check_integrity()
        ledger, replica = self.ledger, self.replica
        hidden = 0
        for unit in range(UNITS):
            live, state = replica.live[unit], ledger.state(unit)
            if not replica.visible[unit]:
                hidden += 1
                open_here = unit in self.open
                assert state is (UnitState.RESTORING if open_here else UnitState.BACKED)
                if not open_here:
                    held = {rank.contents[unit] for rank in replica.ranks}
                    assert held == {ledger.segment_of(unit)}
            elif live in (0, BLOCKS_PER_UNIT):
                assert state is (UnitState.FULL if live else UnitState.FREE)
            else:
                assert state is UnitState.AVAIL
        assert ledger.lendable_blocks == hidden * BLOCKS_PER_UNIT
        live_and_free = sum(replica.live) + ledger.kv_free_blocks
        assert live_and_free + ledger.lendable_blocks == UNITS * BLOCKS_PER_UNIT
        assert {task.unit: task for task in ledger.open_restores} == self.open

    def teardown(self) -> None:
        """Whatever happened, an engine that empties returns to full mode by stepping idly."""
        for blocks in self.requests:
            self.replica.free(blocks)
        self.set_pin(Pin.AUTO)
        for _ in range(4 * UNITS):
            self.replica.now_s += FAST_DWELL_S
            self.step()
            if not self.held:
                for task in list(self.open.values()):
                    assert self.replica.finish(task)
                    self.ended.append(self.open.pop(task.unit))
            if not self.manager.has_pending_work:
                break
        assert self.manager.mode is Mode.FULL
        assert self.ledger.fully_backed
        assert self.manager.fault is None
