"""Requests one router has placed and not seen finish: what a snapshot cannot know yet.

A burst is routed faster than any replica reports. A router therefore counts a request against a
replica from the moment it picks it, before the replica has accepted, and adds to every reported
queue what it has placed there since the report was measured.
"""

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass

_HISTORY_LENGTH = 4096


@dataclass(slots=True)
class _Placement:
    replica_id: str
    accepted: bool


class InFlight:
    """Open requests by replica, and how many there were at any recent moment.

    Methods take the caller's clock reading, monotonic seconds, and those that change something
    return the replicas whose count has changed.

    Parameters
    ----------
    pick_timeout_s
        A request that was picked for a replica but not accepted within this time is given up:
        its client left while it was being placed.
    """

    def __init__(self, pick_timeout_s: float = 5.0) -> None:
        self._pick_timeout_s = pick_timeout_s
        self._placements: dict[str, _Placement] = {}
        self._histories: dict[str, _CountHistory] = {}
        # Where requests ended of which no acceptance was told: refused there, or over already.
        self._ended: dict[str, str] = {}
        # Picks in the order they were made, so that the oldest is always looked at first.
        self._pending: dict[str, float] = {}

    def pick(self, request_id: str, replica_id: str, now_s: float) -> list[str]:
        """Count the request against the replica it is about to be sent to."""
        self._ended.pop(request_id, None)
        changed = self._place(request_id, _Placement(replica_id, accepted=False), now_s)
        self._pending[request_id] = now_s
        return changed

    def accept(self, request_id: str, replica_id: str, now_s: float) -> list[str]:
        """Note which replica took the request: it may be another than the one picked.

        A short request may have ended there before its acceptance is told, also on another replica
        than the one picked.
        """
        if self._ended.pop(request_id, None) == replica_id:
            return self._remove(request_id, now_s)
        return self._place(request_id, _Placement(replica_id, accepted=True), now_s)

    def finish(self, request_id: str, replica_id: str, now_s: float) -> list[str]:
        """Forget the request, provided that it is (still) placed on this replica.

        A refusal by one replica ends a placement there while the request goes on elsewhere.
        """
        placement = self._placements.get(request_id)
        placed_here = placement is not None and placement.replica_id == replica_id
        if placement is None or not placement.accepted:
            self._ended[request_id] = replica_id
            if len(self._ended) > _HISTORY_LENGTH:
                del self._ended[next(iter(self._ended))]
        return self._remove(request_id, now_s) if placed_here else []

    def count(self, replica_id: str) -> int:
        """Open requests on the replica."""
        history = self._histories.get(replica_id)
        return history.latest if history is not None else 0

    def count_at(self, replica_id: str, at_s: float) -> int:
        """Open requests on the replica at a recent moment."""
        history = self._histories.get(replica_id)
        return history.at(at_s) if history is not None else 0

    def expire(self, now_s: float) -> list[str]:
        """Give up picks that were never accepted."""
        changed: list[str] = []
        while self._pending:
            request_id, picked_at_s = next(iter(self._pending.items()))
            if now_s - picked_at_s <= self._pick_timeout_s:
                break
            changed += self._remove(request_id, now_s)
        return changed

    def retain(self, replica_ids: Collection[str]) -> None:
        """Drop every replica not named, with whatever was placed on it."""
        for replica_id in [known for known in self._histories if known not in replica_ids]:
            del self._histories[replica_id]
        for request_id, placement in list(self._placements.items()):
            if placement.replica_id not in replica_ids:
                del self._placements[request_id]
                self._pending.pop(request_id, None)

    def _place(self, request_id: str, placement: _Placement, now_s: float) -> list[str]:
        changed = self._remove(request_id, now_s)
        self._placements[request_id] = placement
        self._histories.setdefault(placement.replica_id, _CountHistory()).add(1, now_s)
        return [*changed, placement.replica_id]

    def _remove(self, request_id: str, now_s: float) -> list[str]:
        self._pending.pop(request_id, None)
        placement = self._placements.pop(request_id, None)
        if placement is None:
            return []
        self._histories[placement.replica_id].add(-1, now_s)
        return [placement.replica_id]


class _CountHistory:
    """A counter that remembers its recent past; times must not go back."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._counts: list[int] = []
        self._before = 0
        """Count before the oldest remembered change."""

    @property
    def latest(self) -> int:
        return self._counts[-1] if self._counts else self._before

    def add(self, change: int, now_s: float) -> None:
        self._counts.append(self.latest + change)
        self._times_s.append(now_s)
        if len(self._times_s) > _HISTORY_LENGTH:
            half = _HISTORY_LENGTH // 2
            self._before = self._counts[half - 1]
            del self._times_s[:half], self._counts[:half]

    def at(self, at_s: float) -> int:
        index = bisect_right(self._times_s, at_s)
        return self._counts[index - 1] if index else self._before
