"""One rank's elastic memory: obeys the scheduler's commands in step order."""

from collections.abc import Callable
from typing import ClassVar, Self

from dps_ray.commands import StepCommand
from dps_ray.memory.driver import Fence
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.region import SharedRegion
from dps_ray.memory.restore import RestoreWorker
from dps_ray.memory.restore_result import RestoreCounters, RestoreResult


class MemoryManager:
    """Shared region and restore worker of one rank; owns both.

    Parameters
    ----------
    region
        Built and uploaded.
    pacer, chunk_bytes, verify, on_done
        As in ``RestoreWorker``.
    """

    worker_type: ClassVar[type[RestoreWorker]] = RestoreWorker

    def __init__(
        self,
        region: SharedRegion,
        *,
        pacer: Pacer,
        chunk_bytes: int,
        verify: bool,
        on_done: Callable[[RestoreResult], None],
    ) -> None:
        self.region = region
        self._pacer = pacer
        self._worker = self.worker_type(
            region, pacer=pacer, chunk_bytes=chunk_bytes, verify=verify, on_done=on_done
        )

    def apply(self, command: StepCommand, fence: Fence) -> None:
        """Carry out one step's orders, before any kernel of the step is launched.

        Parameters
        ----------
        command
            The orders; the same on every rank of the engine.
        fence
            Completion of every earlier step; restores of this command wait for it.

        Raises
        ------
        RuntimeError
            When the restore thread has died.
        """
        self._worker.require_alive()
        # The order matters: a cancelled copy must have ended before its unit is zeroed, and a unit
        # must be zero before the step's first KV write.
        for task in command.cancel:
            self._worker.cancel(task)
        self._worker.hold(command.hold)
        for unit in command.zero:
            self.region.driver.compute.zero(self.region.unit_kv_view(unit))
        for move in command.move:
            self.region.driver.compute.copy(
                self.region.block_view(move.target), self.region.block_view(move.source)
            )
        for task in command.restore:
            self._worker.submit(task, fence)

    @property
    def at_rest(self) -> bool:
        """Whether no restore is queued or running, those of all commands so far included."""
        return self._worker.at_rest

    def begin_step(self) -> int:
        """Tell the pacing that a forward pass is about to be launched.

        Returns
        -------
        int
            Residual bytes copied so far, for the pass's ``note_step``.
        """
        self._pacer.begin_step()
        return self._worker.copied_bytes

    def note_step(
        self, duration_s: float, load: int | None, full_share: float = 0.0, *, copied_before: int
    ) -> None:
        """End a forward pass: tell the pacing of it, and copy what may go before the next one.

        Parameters
        ----------
        duration_s
            How long it took, seconds.
        load
            How large it was, tokens; 0 for a step of an idle engine.
        full_share
            Share of the layers that it ran in full precision.
        copied_before
            What ``begin_step`` returned for it. On a device several passes may have ended since
            the last call: a copy beside any of them lies behind the mark of its own.
        """
        restoring = self._worker.copied_bytes > copied_before
        self._pacer.note_step(duration_s, restoring, load, full_share)
        self._worker.copy_between_steps()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no restore is queued or running; whether that came before the timeout."""
        return self._worker.wait_idle(timeout_s)

    def verify_all(self) -> None:
        """Check all residual bytes against the backup, while no unit is lent.

        Raises
        ------
        ResidualMismatchError
            Naming the segments that differ.
        """
        self.region.verify_all()

    def counters(self) -> RestoreCounters:
        """Totals of the restores since the start."""
        return self._worker.counters()

    def close(self) -> None:
        """End the restores and give all memory back. Idempotent."""
        self._worker.stop()
        self.region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
