"""What the ranks have to be told with the next step."""

from collections.abc import Sequence

from dps_ray.commands import BlockMove, RestoreTask, StepCommand
from dps_ray.modes import Mode
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.states import LedgerError, Lend


class PendingOrders:
    """Orders that gather during a step's reports and allocation, until its command takes them."""

    def __init__(self) -> None:
        self.cancel: list[RestoreTask] = []
        self.zero: list[int] = []
        """Units that join the KV cache with the next step."""
        self.move: list[BlockMove] = []
        self.emptied: set[int] = set()
        """Units that the pending moves read: the copy out runs in the coming step."""

    def lent(self, lend: Lend) -> None:
        """Order what a lend takes: the end of the restore in the unit, and the zeroing."""
        if lend.cancelled is not None:
            self.cancel.append(lend.cancelled)
        self.zero.append(lend.unit)

    def restore_ended(self, task: RestoreTask) -> None:
        """Order the end of a restore on every rank: some may still be copying."""
        self.cancel.append(task)
        self.zero.append(task.unit)

    def moved(self, unit: int, moves: Sequence[BlockMove]) -> None:
        """Order the copies that move blocks out of ``unit``."""
        self.move += moves
        self.emptied.add(unit)

    def take(
        self,
        mode: Mode,
        full_layers: tuple[int, ...],
        *,
        hold: bool,
        restore: tuple[RestoreTask, ...],
    ) -> StepCommand:
        """Hand out everything pending as the command of one step."""
        command = StepCommand(
            mode=mode,
            full_layers=full_layers,
            cancel=tuple(self.cancel),
            zero=tuple(self.zero),
            move=tuple(self.move),
            hold=hold,
            restore=restore,
        )
        self.cancel.clear()
        self.zero.clear()
        self.move.clear()
        self.emptied.clear()
        return command

    def check_integrity(self, ledger: UnitLedger) -> None:
        """Verify the orders against the ledger.

        Raises
        ------
        LedgerError
            A sentence on the broken invariant.
        """
        if len(set(self.zero)) != len(self.zero):
            raise LedgerError(f"a unit would be zeroed twice in one step: {self.zero}")
        for unit in self.zero:
            if ledger.segment_of(unit) is not None:
                raise LedgerError(f"unit {unit} would be zeroed although it holds a segment")
        open_epochs = {task.epoch for task in ledger.open_restores}
        for task in self.cancel:
            if task.epoch in open_epochs:
                raise LedgerError(f"restore {task} would be cancelled although it is open")
