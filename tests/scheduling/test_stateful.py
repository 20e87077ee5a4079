"""The manager survives any history, and the machine notices a manager that would not."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from dps_ray.commands import RestoreTask, StepCommand
from dps_ray.modes import Mode
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.policy import Pressure
from dps_ray.scheduling.states import LedgerError, Lend
from dps_ray.scheduling.sum_manager import SumManager

from .machine import ReplicaMachine

TestAnyHistory = ReplicaMachine.TestCase
TestAnyHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class LendsWithoutCancelling(SumManager):
    def _lend(self) -> None:
        super()._lend()
        self._orders.cancel.clear()


class LendsWithoutZeroing(SumManager):
    def _lend(self) -> None:
        super()._lend()
        self._orders.zero.pop()


class CopiesOnUnderPressure(SumManager):
    def _lend(self) -> None:
        super()._lend()
        self._return._held = False


class NeverGoesOn(SumManager):
    def _begin_restores(self, pressure: Pressure, now: float) -> tuple[RestoreTask, ...]:
        held = self._return._held
        tasks = super()._begin_restores(pressure, now)
        self._return._held |= held
        return tasks


class FailsWithoutCancelling(SumManager):
    def on_restore_failed(self, unit: int, epoch: int, error: str) -> bool:
        known = super().on_restore_failed(unit, epoch, error)
        self._orders.cancel.clear()
        return known


class RestoresWhatItZeroes(SumManager):
    def restore_candidates(self) -> tuple[int, ...]:
        return self.ledger.restorable_units()


class BelievesOutdatedReports(SumManager):
    def on_restored(self, unit: int, epoch: int) -> bool:
        task = self.ledger.open_restore(unit)
        return super().on_restored(unit, task.epoch if task else epoch)


class LendsAgainstThePin(SumManager):
    def _may_lend(self) -> bool:
        return True


class ForgetsItsLends(SumManager):
    def _lend(self) -> None:
        pressed_at_s = self._policy._pressed_at
        super()._lend()
        self._policy._pressed_at = pressed_at_s


class CountsRestoringAsBacked(UnitLedger):
    @property
    def fully_backed(self) -> bool:
        return len(self._backed) + len(self._restoring) == self.num_units


class KeepsLayersThatLoseTheirUnit(SumManager):
    _kept = frozenset[int]()

    def plan_step(self, pressure: Pressure) -> StepCommand:
        command = super().plan_step(pressure)
        self._kept |= {*command.full_layers}
        return (
            command
            if command.mode is Mode.FULL
            else replace(command, full_layers=tuple(self._kept))
        )


class TakesRestoringSegmentsForBack(UnitLedger):
    def missing_segments(self) -> Iterator[int]:
        yield from self._waiting


class ReusesEpochs(UnitLedger):
    def begin_restore(self, unit: int) -> RestoreTask:
        self._last_epoch = 0
        return super().begin_restore(unit)


class LendsBackedUnitsFirst(UnitLedger):
    def lend(self) -> Lend | None:
        if not self._backed:
            return super().lend()
        held, self._restoring = self._restoring, type(self._restoring)()
        lend = super().lend()
        self._restoring = held
        return lend


class LeaksReleasedBlocks(UnitLedger):
    def release(self, unit: int, n: int = 1) -> None:
        super().release(unit, n)
        self._kv_free_blocks -= n


@pytest.mark.parametrize(
    "mutant",
    [
        LendsWithoutCancelling,
        LendsWithoutZeroing,
        CopiesOnUnderPressure,
        NeverGoesOn,
        FailsWithoutCancelling,
        RestoresWhatItZeroes,
        BelievesOutdatedReports,
        LendsAgainstThePin,
        ForgetsItsLends,
        CountsRestoringAsBacked,
        KeepsLayersThatLoseTheirUnit,
        TakesRestoringSegmentsForBack,
        ReusesEpochs,
        LendsBackedUnitsFirst,
        LeaksReleasedBlocks,
    ],
)
def test_machine_catches_a_manager_that(mutant: type[SumManager] | type[UnitLedger]) -> None:
    role = "ledger_type" if issubclass(mutant, UnitLedger) else "manager_type"
    machine = type("MutantMachine", (ReplicaMachine,), {role: mutant})
    with pytest.raises((AssertionError, LedgerError)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                # It ends at the first one that fails; which comes first depends on the modules
                # loaded, whose constants hypothesis tries.
                max_examples=800,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
