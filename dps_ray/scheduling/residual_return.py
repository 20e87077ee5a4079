"""The way back: which restores begin, how they end, and how long the return took."""

from collections.abc import Callable

from dps_ray.commands import RestoreTask
from dps_ray.scheduling.counters import Counters
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.orders import PendingOrders
from dps_ray.scheduling.retry import RestoreRetry, RetryLimits
from dps_ray.scheduling.states import UnitState
from dps_ray.scheduling.unit_blocks import UnitBlocks


class ResidualReturn:
    """Bookkeeping of all restores of one engine. When they may begin is the manager's to say.

    Parameters
    ----------
    ledger, orders, counters, blocks, clock
        The manager's own.
    retry
        As in ``SumManager``.
    """

    def __init__(
        self,
        ledger: UnitLedger,
        orders: PendingOrders,
        counters: Counters,
        blocks: UnitBlocks,
        *,
        clock: Callable[[], float],
        retry: RetryLimits,
    ) -> None:
        self._ledger = ledger
        self._orders = orders
        self._counters = counters
        self._blocks = blocks
        self._clock = clock
        self.retry = RestoreRetry(retry)
        self._began_s: float | None = None
        self._pace_from_s = 0.0
        """Since when bytes have been coming back without a pause."""
        self._back = 0
        """Segments that have come back since then."""
        self._held = False

    @property
    def held(self) -> bool:
        """Whether open restores stand still since a lend."""
        return self._held and bool(self._ledger.open_restores)

    @property
    def running(self) -> bool:
        """Whether bytes are on their way back."""
        return bool(self._ledger.open_restores) and not self._held

    def left_s(self, now: float) -> float | None:
        """How long the rest will take at the pace so far, seconds.

        ``None`` while nothing shows it: no segment has come back since the restores began or went
        on, they stand still, or requests hold blocks of units that would have to be restored.
        """
        count = self._ledger.count
        if count(UnitState.AVAIL) or count(UnitState.FULL) or not (self.running and self._back):
            return None
        missing = self._ledger.num_units - count(UnitState.BACKED)
        return (now - self._pace_from_s) / self._back * missing

    def candidates(self) -> tuple[int, ...]:
        """Return the units whose restore could begin in the coming step, in this order.

        A unit to be zeroed in that step is none: the copy runs beside the compute stream and only
        waits for earlier steps, so the zeroing could wipe restored bytes. Nor is one that blocks
        are moved out of in that step: they could be overwritten first.
        """
        return tuple(
            unit
            for unit in self._ledger.restorable_units()
            if unit not in self._orders.zero and unit not in self._orders.emptied
        )

    def advance(self, units: tuple[int, ...], now: float) -> tuple[RestoreTask, ...]:
        """Let open restores go on, and begin others in ``units``, in this order."""
        stood_still = not self.running
        self._held = False
        tasks = []
        for unit in units:
            self._blocks.hide_unit(unit)
            tasks.append(self._ledger.begin_restore(unit))
        if self.running and self._began_s is None:
            self._began_s = now
        if stood_still:
            self._pace_from_s, self._back = now, 0
        self._counters.restores_started += len(tasks)
        return tuple(tasks)

    def succeeded(self, unit: int, epoch: int) -> bool:
        """Bind a segment that every rank has restored; ``False`` where the report is outdated."""
        task = self._current(unit, epoch)
        if task is None:
            return False
        self._ledger.complete_restore(task)
        self.retry.succeeded(task.segment)
        self._back += 1
        self._counters.restores_completed += 1
        return True

    def failed(self, unit: int, epoch: int, error: str) -> bool:
        """Give the unit to the KV cache; ``False`` where the report is outdated."""
        task = self._current(unit, epoch)
        if task is None:
            return False
        self._give_back(task)
        self.retry.failed(task.segment, error, self._clock())
        self._counters.restores_failed += 1
        return True

    def stop(self) -> None:
        """End all open restores; their segments are restored later, from their beginning."""
        for task in self._ledger.open_restores:
            self._give_back(task)
            self._counters.restores_cancelled += 1
            self._began_s = None

    def lent(self) -> None:
        """A unit was lent: what is still open stops where it is, and the way back begins anew.

        The units under restore are the next to be lent, and copying would stretch the steps just
        when demand is highest.
        """
        self._began_s = None
        self._held = True

    def arrived(self, now: float) -> None:
        """Full mode is back."""
        if self._began_s is not None:
            self._counters.last_restore_s = now - self._began_s
            self._began_s = None

    def _give_back(self, task: RestoreTask) -> None:
        """End an open restore; its unit, partly written, joins the KV cache."""
        self._ledger.abandon_restore(task)
        self._orders.restore_ended(task)
        self._blocks.reveal_unit(task.unit)

    def _current(self, unit: int, epoch: int) -> RestoreTask | None:
        task = self._ledger.open_restore(unit)
        return task if task is not None and task.epoch == epoch else None
