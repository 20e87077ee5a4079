"""A copy that the restore thread leaves to the thread that runs the steps, slice by slice.

On a host every thread takes cycles from the steps, and one that wakes amid a step makes all of the
step's threads wait for the one it pushed aside. Between two steps nobody waits.
"""

import threading
import time
from collections.abc import Callable

from dps_ray.memory.driver import Executor
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.segment_copy import SegmentCopy

MOST_WAIT_S = 1e-3
"""For the restore thread, between two steps: it has little to do, unless a fence holds it up."""


class Handover:
    """At most one copy, offered while steps run.

    Parameters
    ----------
    changed
        The worker's; held by whoever copies a slice.
    pacer
        Says how large a slice may be, and for how long the replica counts as busy.
    executor
        Copies the slices.
    """

    def __init__(self, changed: threading.Condition, pacer: Pacer, executor: Executor) -> None:
        self._changed = changed
        self._pacer = pacer
        self._executor = executor
        self._offered: SegmentCopy | None = None
        self._failure: Exception | None = None

    def offer(self, copy: SegmentCopy, ended: Callable[[], bool]) -> bool:
        """Leave ``copy`` to the steps until it is complete, they have ceased, or ``ended()``.

        For the restore thread.

        Returns
        -------
        bool
            Whether there were steps to leave it to.

        Raises
        ------
        Exception
            That of a slice which could not be copied.
        """
        with self._changed:
            left_s = self._pacer.busy_left_s
            if not left_s:
                return False
            self._offered = copy
            self._changed.wait_for(
                lambda: (
                    ended()
                    or self._failure is not None
                    or not copy.left_bytes
                    or not self._pacer.busy_left_s
                ),
                left_s,
            )
            self._offered = None
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def copy_slices(self, idle: Callable[[], bool], count: Callable[[int, float], None]) -> None:
        """Copy what may be copied now.

        For the steps' thread, between two steps. A failure is the restore thread's to report. When
        a copy is complete, that thread reports it and offers the next one meanwhile: amid the next
        step it would push one of the step's threads aside.

        Parameters
        ----------
        idle
            Says that the restore thread has no copy to offer.
        count
            Is given each slice's bytes and seconds, before anybody learns that its copy is
            complete: the report of that copy contains them.
        """
        with self._changed:
            while self._offered is not None and self._pacer.slice_bytes:
                copy = self._offered
                count(*self._copy_slice(copy))
                if copy.left_bytes and self._failure is None:
                    break
                self._offered = None
                self._changed.notify_all()
                began_s = time.monotonic()
                self._changed.wait_for(lambda: self._offered is not None or idle(), MOST_WAIT_S)
                self._pacer.note_slice(0, time.monotonic() - began_s)

    def wake(self) -> None:
        """Let the restore thread see that the steps have ceased."""
        with self._changed:
            if self._offered is not None:
                self._changed.notify_all()

    def _copy_slice(self, copy: SegmentCopy) -> tuple[int, float]:
        nbytes = min(self._pacer.slice_bytes, copy.left_bytes)
        began_s = time.monotonic()
        try:
            copy.issue(nbytes, self._executor)
            copy.land(0)
        except Exception as failure:
            self._failure = failure
            return 0, 0.0
        seconds = time.monotonic() - began_s
        self._pacer.note_slice(nbytes, seconds)
        return nbytes, seconds
