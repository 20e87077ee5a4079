"""The fleet at one moment, as the controller publishes it and routers read it."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dps_ray.fleet.state import Health, ReplicaState


class Standing(StrEnum):
    """How far an entry can be trusted, and whether its replica may take work."""

    LIVE = "live"
    """Recently heard and ready."""
    COLD = "cold"
    """Never heard, or still starting."""
    STALE = "stale"
    """Heard, but its figures were measured too long ago: they say nothing about now."""
    DRAINING = "draining"
    DEAD = "dead"
    """It said so, which is final; or its connection has just broken, and it was not heard since."""


class FreshnessOptions(BaseModel):
    """When silence changes what is believed about a replica."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stale_after_s: Annotated[float, Field(gt=0.0)] = 3.5
    """Age of its figures after which an entry is stale, seconds. Three missed heartbeats and some
    slack; keep it above the longest step of an engine, which has nothing new to tell during one."""
    forget_after_s: Annotated[float, Field(gt=0.0)] = 60.0
    """Silence after which an entry is dropped, seconds."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.forget_after_s <= self.stale_after_s:
            raise ValueError(
                f"forget_after_s ({self.forget_after_s}) must be above stale_after_s "
                f"({self.stale_after_s}), or a silent replica would vanish before it shows as stale"
            )
        return self


def classify(state: ReplicaState, age_s: float, options: FreshnessOptions) -> Standing:
    """Standing of a replica whose latest state is ``age_s`` old.

    Death and draining are final, so they outlast the age limit; everything else does not.
    """
    if state.health is Health.DEAD:
        return Standing.DEAD
    if state.health is Health.DRAINING:
        return Standing.DRAINING
    if age_s > options.stale_after_s:
        return Standing.STALE
    if state.health is Health.STARTING:
        return Standing.COLD
    return Standing.LIVE


class Entry(BaseModel):
    """One replica in a snapshot."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    replica_id: str
    standing: Standing
    age_s: float | None
    """Time since the state was measured, seconds; ``None`` when there is none."""
    state: ReplicaState | None
    lost_ago_s: float | None = None
    """Time since its connection to the controller broke, seconds, while that makes it dead. Most
    likely its process was killed, and Serve will withdraw it. One that still stands when
    ``stale_after_s`` has passed was merely cut off: it is stale then, and may serve."""
    changed_ago_s: float | None = None
    """Time since its latest transition was heard, or its connection broke, seconds."""

    @classmethod
    def cold(cls, replica_id: str) -> Self:
        """Entry of a replica that has never been heard."""
        return cls(replica_id=replica_id, standing=Standing.COLD, age_s=None, state=None)


class FleetSnapshot(BaseModel):
    """All entries at one moment. A later snapshot of the same fleet has a higher version."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int
    entries: tuple[Entry, ...]
