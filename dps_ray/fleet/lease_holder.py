"""A replica's side of the restore leases."""

import zlib

from dps_ray.fleet.leases import LeaseOptions


class LeaseHolder:
    """The replica's side: until when may it begin to restore?

    Before the first answer of a controller, and while none answers, the latest terms count; see
    ``LeaseOptions.alone_after_s``.

    Parameters
    ----------
    replica_id
        Decides when this replica goes alone, so that not all do at once.
    terms
        Terms until a controller sends its own.
    now_s
        Monotonic seconds; every later ``now_s`` is of the same clock.
    """

    def __init__(self, replica_id: str, terms: LeaseOptions, now_s: float) -> None:
        self._terms = terms
        self._answered_at_s = now_s
        self._until_s = 0.0
        self._returned_at_s = float("-inf")
        self._stagger = zlib.crc32(replica_id.encode()) / 2**32

    def reporting(self, wanted: bool, now_s: float) -> None:
        """Note that a report is about to be sent, and whether it says that a lease is wanted.

        One that says no gives the lease back, whether or not its answer arrives: the controller
        may have passed it on by then.
        """
        if not wanted:
            self._until_s = 0.0
            self._returned_at_s = now_s

    def answered(self, terms: LeaseOptions, granted: bool, sent_at_s: float) -> None:
        """Take in the controller's answer to a report that was sent at ``sent_at_s``."""
        self._terms = terms
        self._answered_at_s = sent_at_s
        granted = granted and sent_at_s > self._returned_at_s
        self._until_s = sent_at_s + terms.ttl_s if granted else 0.0

    def has_lease(self, now_s: float) -> bool:
        """Whether a lease is valid now."""
        return self._terms.enabled and now_s < self._until_s

    def restore_until_s(self, now_s: float) -> float | None:
        """Restores may begin until then; ``None`` for any time."""
        if not self._terms.enabled or self.is_alone(now_s):
            return None
        return self._until_s

    def is_alone(self, now_s: float) -> bool:
        """Whether the controller has been silent for so long that this replica decides itself."""
        after_s = self._terms.alone_after_s
        silence_s = now_s - self._answered_at_s
        return after_s is not None and silence_s >= after_s * (1.0 + self._stagger)
