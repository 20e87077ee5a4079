"""Background restore: copies residual segments back, chunk by chunk, until told otherwise."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from dps_ray.commands import RestoreTask
from dps_ray.memory.driver import Fence
from dps_ray.memory.handover import Handover
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.region import SharedRegion
from dps_ray.memory.restore_result import RestoreCounters, RestoreResult, mismatch
from dps_ray.memory.segment_copy import SegmentCopy


class _CancelledError(Exception):
    """Unwinds the worker from a task that was abandoned."""


class RestoreWorker:
    """One thread that restores segments in the order they were submitted.

    While steps run, it leaves the copying to their thread where both share the cores.

    Parameters
    ----------
    region
        Where the segments live.
    pacer
        Says how long to wait before each chunk.
    chunk_bytes
        Bytes copied between two looks at cancellation and pacing.
    verify
        Compare each segment with the backup's checksum before it counts as restored.
    on_done
        Called from the worker's thread for every task that was not cancelled; it must be quick and
        must not call back into the worker.
    """

    def __init__(
        self,
        region: SharedRegion,
        *,
        pacer: Pacer,
        chunk_bytes: int,
        verify: bool,
        on_done: Callable[[RestoreResult], None],
    ) -> None:
        self._region = region
        self._pacer = pacer
        self._chunk_bytes = chunk_bytes
        self._verify = verify
        self._on_done = on_done
        self._changed = threading.Condition()
        between = region.driver.between_steps
        self._handover = Handover(self._changed, pacer, between) if between else None
        self._queue: deque[tuple[RestoreTask, Fence]] = deque()
        self._active: RestoreTask | None = None
        self._abandoned = False
        """The active task was cancelled: no further effect may begin."""
        self._in_effect = False
        """The active task is copying, remapping or reporting right now."""
        self._held = False
        """No further chunk of any task is copied for now; what has been copied stays."""
        self._issued: Fence | None = None
        """The latest chunk given to the link, of whichever task."""
        self._stopping = False
        self._counters = RestoreCounters()
        self._died: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dps-restore", daemon=True)
        self._thread.start()

    def require_alive(self) -> None:
        """Raise once the thread has died: restores ordered before would never end.

        Raises
        ------
        RuntimeError
            Caused by what the thread died of.
        """
        # Unlocked, as every step asks: it is written once, when the thread dies.
        if self._died is not None:
            raise RuntimeError("the restore thread died") from self._died

    def submit(self, task: RestoreTask, fence: Fence) -> None:
        """Queue a restore; nothing is copied before ``fence`` has been reached."""
        with self._changed:
            self.require_alive()
            if self._stopping:
                raise RuntimeError(f"{task} was submitted after stop()")
            self._queue.append((task, fence))
            self._changed.notify_all()

    def cancel(self, task: RestoreTask) -> None:
        """Abandon a restore, queued or running; no effect on a finished one.

        When this returns, no chunk of the task will be issued, all later work of the compute
        executor runs after those in flight, and ``on_done`` either has returned for it or will
        never be called. Call it where the steps are launched from.
        """
        with self._changed:
            kept = deque(item for item in self._queue if item[0] != task)
            if len(kept) < len(self._queue):
                self._queue = kept
                self._counters.add(cancelled=1)
            elif self._active == task:
                self._abandoned = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._active != task or not self._in_effect)
                # The worker may have gone on to another task: its chunk is no earlier than ours.
                if self._issued is not None:
                    self._region.driver.compute.wait_for(self._issued)

    def hold(self, held: bool) -> None:
        """Let restores stop where they are, chunks in flight aside, or go on from there.

        Only the steps' thread calls it and writes ``_held``, so that it may read it unlocked.
        """
        if held is not self._held:
            with self._changed:
                self._held = held
                self._changed.notify_all()

    def copy_between_steps(self) -> None:
        """Copy what may be copied before the next step. Call it from the steps' thread."""
        if self._handover is None:
            return
        with self._changed:
            if self._idle():
                return
            if not self._pacer.busy_left_s:
                self._handover.wake()
            elif not (self._held or self._abandoned):
                self._handover.copy_slices(
                    self._idle, lambda nbytes, s: self._count(bytes=nbytes, busy_seconds=s)
                )

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is queued or running; whether that came before the timeout."""
        with self._changed:
            return self._changed.wait_for(self._idle, timeout_s)

    @property
    def at_rest(self) -> bool:
        """Whether no restore is queued or running."""
        with self._changed:
            return self._idle()

    @property
    def copied_bytes(self) -> int:
        """Residual bytes copied since the start."""
        return self._counters.bytes

    def counters(self) -> RestoreCounters:
        """Totals since the start."""
        with self._changed:
            return replace(self._counters)

    def stop(self) -> None:
        """Abandon everything and end the thread, once a fence being waited for is reached.

        Idempotent.
        """
        with self._changed:
            self._stopping = True
            self._abandoned = True
            self._counters.add(cancelled=len(self._queue))
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                self._restore(*item)
        except BaseException as error:
            with self._changed:
                self._died = error
                self._active = None
                self._queue.clear()
                self._changed.notify_all()
            raise

    def _next(self) -> tuple[RestoreTask, Fence] | None:
        with self._changed:
            self._active = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._stopping)
            if self._stopping:
                return None
            task, fence = self._queue.popleft()
            self._active, self._abandoned = task, False
            return task, fence

    def _restore(self, task: RestoreTask, fence: Fence) -> None:
        copy, error = None, None
        busy_before_s = self.counters().busy_seconds
        try:
            copy = self._segment_copy(task)
            self._bind(task, fence)
            self._copy(copy)
            error = None if self._verified(task, copy.checksum) else mismatch(task)
        except _CancelledError:
            self._count(cancelled=1)
            return
        except Exception as failure:
            # The failure is reported below, and then the unit is zeroed for the KV cache: chunks
            # in flight must have landed by then.
            self._region.driver.transfer.synchronize()
            error = f"segment {task.segment} was not restored into unit {task.unit}: {failure}"
        seconds = self.counters().busy_seconds - busy_before_s
        copied, resumed = (copy.copied_bytes, copy.resumed_bytes) if copy else (0, 0)
        result = RestoreResult(task, error is None, copied, seconds, resumed, error)
        try:
            with self._effect():
                self._on_done(result)
                self._count(**{"completed" if result.ok else "failed": 1})
        except _CancelledError:
            self._count(cancelled=1)

    def _bind(self, task: RestoreTask, fence: Fence) -> None:
        transfer = self._region.driver.transfer
        if self._region.maps(task.segment, task.unit):
            transfer.wait_for(fence)
            return
        # No stream orders a remap: all that may use the addresses must be over, on the host's word.
        fence.wait()
        transfer.synchronize()
        with self._effect():
            self._region.rebind(task.segment, task.unit)

    def _segment_copy(self, task: RestoreTask) -> SegmentCopy:
        """A copy of the task's segment that has everything before it.

        Progress dies with the task: nobody knows what a unit holds that was stolen in between.
        """
        return SegmentCopy.of(self._region, task.segment, summed=self._verify)

    def _copy(self, copy: SegmentCopy) -> None:
        """Copy what is left of a segment, as fast as pacing and holds allow."""
        queued = self._region.driver.transfer.depth - 1

        def ended() -> bool:
            return self._abandoned or self._held

        while copy.left_bytes:
            if self._held:
                self._wait_released(copy)
            if self._handover is not None and self._handover.offer(copy, ended):
                self._require_wanted()
                continue
            size = min(self._pacer.piece_bytes(self._chunk_bytes), copy.left_bytes)
            delay_s = self._pacer.next_delay_s(size)
            if delay_s > 0:
                self._land(copy, 0)
                self._pause(delay_s)
                if self._held:
                    continue
            with self._effect():
                self._issued = copy.issue(size)
            self._count(bytes=size)
            self._land(copy, queued)
        self._land(copy, 0)

    def _land(self, copy: SegmentCopy, allowed: int) -> None:
        """Wait until no more than ``allowed`` chunks are in flight."""
        for nbytes, seconds in copy.land(allowed):
            self._pacer.note_copy(nbytes, seconds)
            self._count(busy_seconds=seconds)

    def _verified(self, task: RestoreTask, checksum: int | None) -> bool:
        if not self._verify:
            return True
        began_s = time.monotonic()
        matches = self._region.verify(task.segment, checksum)
        self._count(busy_seconds=time.monotonic() - began_s)
        return matches

    def _idle(self) -> bool:
        return self._active is None and not self._queue

    def _pause(self, delay_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned, delay_s)

    def _wait_released(self, copy: SegmentCopy) -> None:
        self._land(copy, 0)
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or not self._held)
        copy.resume()

    def _require_wanted(self) -> None:
        if self._abandoned:
            raise _CancelledError

    @contextmanager
    def _effect(self) -> Iterator[None]:
        """Mark something that ``cancel`` must wait for; refused once the task is abandoned."""
        with self._changed:
            self._require_wanted()
            self._in_effect = True
        try:
            yield
        finally:
            with self._changed:
                self._in_effect = False
                self._changed.notify_all()

    def _count(self, **amounts: float) -> None:
        with self._changed:
            self._counters.add(**amounts)
