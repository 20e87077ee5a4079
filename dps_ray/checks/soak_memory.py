"""The product's memory manager, with a window on restores that a burst holds up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dps_ray.checks.soak_links import STALL_S
from dps_ray.memory.manager import MemoryManager
from dps_ray.memory.restore import RestoreWorker

if TYPE_CHECKING:
    from dps_ray.memory.segment_copy import SegmentCopy


class SoakWorker(RestoreWorker):
    """Lets somebody write into a segment whose copy is held."""

    _waiting: SegmentCopy | None = None

    def disturb(self) -> bool:
        """Flip a bit of what a held copy has brought over; whether there was one."""
        with self._changed:
            if self._held and not self._abandoned:
                # Until its chunks in flight have landed: they would undo the write.
                self._changed.wait_for(lambda: self._waiting or not self._active, 10 * STALL_S)
            copy, task = self._waiting, self._active
            if copy is None or task is None or not copy.copied_bytes:
                return False
            if self._abandoned or not self._held:
                return False
            self._region.segment_view(task.segment)[copy.copied_bytes - 1] ^= 0x04
            return True

    def _wait_released(self, copy: SegmentCopy) -> None:
        self._land(copy, 0)
        with self._changed:
            self._waiting = copy
            self._changed.notify_all()
        super()._wait_released(copy)
        with self._changed:
            self._waiting = None


class SoakMemory(MemoryManager):
    """The product's manager over a worker that can be disturbed."""

    worker_type = SoakWorker

    def disturb(self) -> bool:
        """See ``SoakWorker``."""
        assert isinstance(self._worker, SoakWorker)
        return self._worker.disturb()
