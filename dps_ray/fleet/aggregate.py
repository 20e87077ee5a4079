"""The controller's core: reports in, versioned snapshots out.

All of it is soft state. A restarted controller starts empty and knows the fleet again after one
heartbeat of every replica; versions start from a value that the caller takes from a clock, so that
they keep growing across restarts and a reader's old version never looks current.
"""

from collections.abc import Callable
from typing import Annotated, Self

from pydantic import Field, model_validator

from dps_ray.fleet.snapshot import FleetSnapshot, FreshnessOptions
from dps_ray.fleet.state import ReplicaState
from dps_ray.fleet.table import StateTable, Verdict


class AggregateOptions(FreshnessOptions):
    """How the controller ages and publishes what it hears."""

    publish_period_s: Annotated[float, Field(gt=0.0)] = 0.25
    """Shortest time between two versions made by mere refreshes, seconds. Transitions are
    published at once; this bounds what the heartbeats of a large fleet cost every router."""

    @model_validator(mode="after")
    def _publish_in_time(self) -> Self:
        if self.publish_period_s >= self.stale_after_s:
            raise ValueError(
                f"publish_period_s ({self.publish_period_s:g}) must be below stale_after_s "
                f"({self.stale_after_s:g}), or every replica is stale between two publications"
            )
        return self


class FleetAggregate:
    """Latest states of the fleet and the version of what was published about them.

    Parameters
    ----------
    options
        Ageing and publication; replace them with ``reconfigure``.
    clock
        Monotonic seconds.
    first_version
        Version of the empty fleet.
    """

    def __init__(
        self, options: AggregateOptions, clock: Callable[[], float], first_version: int = 0
    ) -> None:
        self._options = options
        self._clock = clock
        self._table = StateTable()
        self._version = first_version
        self._published_at_s = clock()
        self._first_version = first_version
        # Version in which each replica's latest report is or will be published.
        self._changed_in: dict[str, int] = {}
        self._unpublished = False
        self.verdicts = dict.fromkeys(Verdict, 0)
        """Reports since start, by what became of them."""

    @property
    def version(self) -> int:
        """Version of the snapshot that readers should have."""
        return self._version

    @property
    def options(self) -> AggregateOptions:
        return self._options

    def apply(self, state: ReplicaState) -> Verdict:
        """Take in one report; a transition becomes visible in ``version`` at once."""
        verdict = self._table.apply(state, self._clock(), state.measured_ago_s)
        self.verdicts[verdict] += 1
        if verdict.accepted:
            self._changed_in[state.replica_id] = self._version + 1
        if verdict is Verdict.TRANSITION:
            self._publish()
        elif verdict is Verdict.REFRESH:
            self._unpublished = True
        return verdict

    def lose(self, replica_id: str) -> None:
        """A replica's connection broke: publish at once that it counts as dead."""
        if self._table.lose(replica_id, self._clock()):
            self._changed_in[replica_id] = self._version + 1
            self._publish()

    def reconfigure(self, options: AggregateOptions) -> None:
        """Change the options; readers get a new version."""
        self._options = options
        self._publish()

    def tick(self) -> list[ReplicaState]:
        """Do what is due: drop silent replicas, publish collected refreshes.

        Returns the last states of those that were dropped.

        Call it at least once every ``publish_period_s``.
        """
        now_s = self._clock()
        vanished = self._table.forget(now_s, self._options)
        waited = now_s - self._published_at_s >= self._options.publish_period_s
        for state in vanished:
            del self._changed_in[state.replica_id]
        if vanished or (self._unpublished and waited):
            self._publish()
        return vanished

    def snapshot(self) -> FleetSnapshot:
        """The fleet as known now; ages and standings are current."""
        entries = tuple(self._table.entries(self._clock(), self._options))
        return FleetSnapshot(version=self._version, entries=entries)

    def changes_since(self, version: int | None) -> FleetSnapshot:
        """The replicas heard since a version; all of them for one that is not of this controller.

        Between two versions a reader ages what it has by its own clock, so a replica that has not
        been heard again has nothing new to say.
        """
        if version is None or not self._first_version <= version <= self._version:
            return self.snapshot()
        now_s = self._clock()
        entries = tuple(
            self._table.entry(replica_id, now_s, self._options)
            for replica_id, changed_in in self._changed_in.items()
            if changed_in > version
        )
        return FleetSnapshot(version=self._version, entries=entries)

    def _publish(self) -> None:
        self._version += 1
        self._published_at_s = self._clock()
        self._unpublished = False
