"""The latest state of every known replica, with its age: kept by the controller and by each router.

Reports may arrive late, twice or out of order; the sequence number decides. An age is what the
sender says its figures' age was, measured on its own clock, and the time since receipt on the
keeper's: no two clocks are ever compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from dps_ray.fleet.snapshot import Entry, FreshnessOptions, Standing, classify
from dps_ray.fleet.state import Health, ReplicaState


class Verdict(StrEnum):
    """What became of a report."""

    TRANSITION = "transition"
    """Accepted, and something routers must know at once has changed."""
    REFRESH = "refresh"
    """Accepted; figures may have moved."""
    OUTDATED = "outdated"
    """Refused: a later report of this replica is already known."""
    AFTER_DEATH = "after_death"
    """Refused: the replica has been reported dead, which is final."""

    @property
    def accepted(self) -> bool:
        return self in (Verdict.TRANSITION, Verdict.REFRESH)


@dataclass(frozen=True, slots=True)
class _Record:
    state: ReplicaState
    measured_at_s: float
    """The keeper's clock when the state was current."""
    heard_at_s: float
    """The keeper's clock when it came."""
    changed_at_s: float
    """The keeper's clock when its latest transition came, or its connection broke."""
    lost_at_s: float | None = None
    """The keeper's clock when its connection broke, if nothing was heard after that."""


def transition_key(state: ReplicaState) -> tuple[object, ...]:
    """The part of a state whose change is a transition: pushed and published without delay."""
    return (
        state.health,
        state.mode,
        state.pin,
        state.restoring,
        state.wants_restore,
        state.fault,
    )


class StateTable:
    """Latest states by replica, aged on an injected clock reading."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def apply(self, state: ReplicaState, now_s: float, age_s: float = 0.0) -> Verdict:
        """Take in one report that was ``age_s`` old when it reached this table at ``now_s``."""
        known = self._records.get(state.replica_id)
        if known is not None:
            if state.sequence <= known.state.sequence:
                return Verdict.OUTDATED
            if known.state.health is Health.DEAD and state.health is not Health.DEAD:
                return Verdict.AFTER_DEATH
        has_changed = (
            known is None
            or known.lost_at_s is not None
            or transition_key(state) != transition_key(known.state)
        )
        changed_at_s = now_s if known is None or has_changed else known.changed_at_s
        self._records[state.replica_id] = _Record(state, now_s - age_s, now_s, changed_at_s)
        return Verdict.TRANSITION if has_changed else Verdict.REFRESH

    def lose(self, replica_id: str, at_s: float) -> bool:
        """Note that a replica's connection broke at ``at_s``; ``False``: that changes nothing."""
        record = self._records.get(replica_id)
        if (
            record is None
            or record.lost_at_s is not None
            or record.state.health in (Health.DEAD, Health.DRAINING)
        ):
            return False
        self._records[replica_id] = replace(record, lost_at_s=at_s, changed_at_s=at_s)
        return True

    def entry(self, replica_id: str, now_s: float, options: FreshnessOptions) -> Entry:
        """What is known about one replica; an unheard-of replica is a cold entry."""
        record = self._records.get(replica_id)
        if record is None:
            return Entry.cold(replica_id)
        age_s = max(0.0, now_s - record.measured_at_s)
        lost_ago_s = None if record.lost_at_s is None else max(0.0, now_s - record.lost_at_s)
        if lost_ago_s is not None and lost_ago_s > options.stale_after_s:
            lost_ago_s = None
        return Entry(
            replica_id=replica_id,
            standing=(
                classify(record.state, age_s, options) if lost_ago_s is None else Standing.DEAD
            ),
            age_s=age_s,
            state=record.state,
            lost_ago_s=lost_ago_s,
            changed_ago_s=max(0.0, now_s - record.changed_at_s),
        )

    def entries(self, now_s: float, options: FreshnessOptions) -> Iterator[Entry]:
        """All entries in the order of their replica ids."""
        for replica_id in sorted(self._records):
            yield self.entry(replica_id, now_s, options)

    def forget(self, now_s: float, options: FreshnessOptions) -> list[ReplicaState]:
        """Drop replicas silent for longer than ``forget_after_s``; return their last states."""
        gone = [
            record.state
            for record in self._records.values()
            if now_s - record.heard_at_s > options.forget_after_s
        ]
        for state in gone:
            del self._records[state.replica_id]
        return gone
