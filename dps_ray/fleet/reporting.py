"""When a replica has to say something: at once on a transition, otherwise at a heartbeat."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dps_ray.fleet.state import ReplicaState
from dps_ray.fleet.table import transition_key


class ReportOptions(BaseModel):
    """How often a replica looks at its engine and how often it reports."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    poll_period_s: Annotated[float, Field(gt=0.0)] = 0.05
    """Time between two looks at the engine's status, seconds: the longest that a transition stays
    unnoticed."""
    heartbeat_s: Annotated[float, Field(gt=0.0)] = 1.0
    """Longest silence, seconds. Routers call an entry stale after the controller's
    ``stale_after_s``: keep this below a third of it."""

    lease_poll_s: Annotated[float, Field(gt=0.0)] = 0.25
    """Time between two reports while the replica waits for a restore lease, seconds; they take the
    heartbeat's place."""
    hung_after_s: Annotated[float, Field(gt=0.0)] = 60.0
    """An engine that has ended no step and whose ranks have not all answered for so long hangs: it
    counts as dead, and Serve replaces the replica. Keep it above the longest step, seconds."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.poll_period_s > self.heartbeat_s:
            raise ValueError(
                f"poll_period_s ({self.poll_period_s}) must not be above heartbeat_s "
                f"({self.heartbeat_s}): a heartbeat is sent at a poll"
            )
        if self.lease_poll_s > self.heartbeat_s:
            raise ValueError(
                f"lease_poll_s ({self.lease_poll_s:g}) must not be above heartbeat_s "
                f"({self.heartbeat_s:g}): a replica that waits for a lease would be silent for "
                "longer than any other, stale, and out of the queue for leases"
            )
        return self


class ReportSchedule:
    """Decides which readings are sent. A reading counts as sent only once it was delivered."""

    def __init__(self, options: ReportOptions) -> None:
        self._options = options
        self._delivered: tuple[object, ...] | None = None
        self._delivered_at_s = float("-inf")

    def is_due(self, state: ReplicaState, now_s: float) -> bool:
        """Whether ``state`` must be sent now."""
        if transition_key(state) != self._delivered:
            return True
        waits = state.wants_restore and not state.has_lease
        period_s = self._options.lease_poll_s if waits else self._options.heartbeat_s
        return now_s - self._delivered_at_s >= period_s

    def delivered(self, state: ReplicaState, now_s: float) -> None:
        """Note that ``state`` has reached the controller."""
        self._delivered = transition_key(state)
        self._delivered_at_s = now_s
