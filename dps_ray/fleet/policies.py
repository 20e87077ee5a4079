"""Routing policies and their parameters, which an operator can change while the fleet runs.

A policy only names its parts; ``build`` puts them together for one router.
"""

from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dps_ray.fleet.filters import Filter, Freshness, Health, PrecisionFloor, Restoring
from dps_ray.fleet.pickers import Drawn, Lowest, Picker, Probe, Rotating
from dps_ray.fleet.pipeline import Pipeline
from dps_ray.fleet.scorers import (
    Headroom,
    Locality,
    Precision,
    PrefixAffinity,
    Queue,
    Scorer,
    Session,
)
from dps_ray.modes import Floor


class _Policy(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def build(self, rng: np.random.Generator) -> Pipeline:
        """The policy's parts at work, for one router."""
        return Pipeline(self._filters(), self._scorers(), self._picker(), self._probe(), rng)

    def _filters(self) -> list[Filter]:
        return [Health(), PrecisionFloor()]

    def _scorers(self) -> list[Scorer]:
        return []

    def _picker(self) -> Picker:
        return Lowest()

    def _probe(self) -> Probe:
        return Probe(share=0.0)


class RoundRobin(_Policy):
    """One replica after the other. It knows nothing of load, modes and restores."""

    name: Literal["round_robin"] = "round_robin"

    def _picker(self) -> Picker:
        return Rotating()


class PowerOfTwo(_Policy):
    """Two replicas drawn at random, the one with fewer requests first: the usual baseline."""

    name: Literal["power_of_two"] = "power_of_two"

    def _scorers(self) -> list[Scorer]:
        return [Queue(weight=1.0)]

    def _picker(self) -> Picker:
        return Drawn(choices=2)


class LeastPressure(_Policy):
    """Most KV headroom and shortest queue first, whatever the mode and whether it restores."""

    name: Literal["least_pressure"] = "least_pressure"
    headroom: Headroom = Headroom()
    queue: Queue = Queue()
    probe: Probe = Probe()

    def _filters(self) -> list[Filter]:
        return [*super()._filters(), Freshness()]

    def _scorers(self) -> list[Scorer]:
        return [self.headroom, self.queue]

    def _probe(self) -> Probe:
        return self.probe


class _RestoreAware(_Policy):
    """Leaves restoring replicas alone; elsewhere weighs memory, queue, precision and caches."""

    mode: Precision = Precision()
    headroom: Headroom = Headroom()
    queue: Queue = Queue()
    prefix: PrefixAffinity = PrefixAffinity()
    session: Session = Session()
    locality: Locality = Locality()
    probe: Probe = Probe()

    def _filters(self) -> list[Filter]:
        return [*super()._filters(), Freshness(), Restoring()]

    def _scorers(self) -> list[Scorer]:
        return [self.mode, self.headroom, self.queue, self.prefix, self.session, self.locality]

    def _probe(self) -> Probe:
        return self.probe


class ModeAware(_RestoreAware):
    """The default: restoring replicas are left alone, and being in fast mode costs something."""

    name: Literal["mode_aware"] = "mode_aware"


class FullFirst(_RestoreAware):
    """As ``mode_aware``, but no replica in fast mode gets work while one in full mode accepts."""

    name: Literal["full_first"] = "full_first"

    def _filters(self) -> list[Filter]:
        return [Health(), PrecisionFloor(at_least=Floor.PREFER_FULL), Freshness(), Restoring()]


Policy = Annotated[
    RoundRobin | PowerOfTwo | LeastPressure | ModeAware | FullFirst, Field(discriminator="name")
]
"""Any policy, chosen by its ``name``."""
POLICIES: dict[str, type[RoundRobin | PowerOfTwo | LeastPressure | ModeAware | FullFirst]] = {
    kind().name: kind for kind in get_args(get_args(Policy)[0])
}
