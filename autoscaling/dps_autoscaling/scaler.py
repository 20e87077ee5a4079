"""How many replicas a fleet should have: a pure decision over what its replicas have measured.

Elastic replicas bridge a burst in fast mode, so a burst alone is no reason to start a replica.
What counts is what lasts: means over Serve's look-back period of KV demand, of requests, of time
spent in fast mode and of requests waiting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]


class ScalingOptions(BaseModel):
    """``policy_kwargs`` of the policy. Serve's own options say how long the wish to grow must last
    (``upscale_delay_s``), over which time is averaged, and the bounds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_pressure: Annotated[float, Field(gt=0.0, le=1.0)] = 0.7
    """Mean KV demand a replica is sized for, as a share of its base blocks: what it can hold in
    full mode. Beside it ``target_ongoing_requests`` of Serve sizes by requests; the larger of the
    two demands counts."""
    grow_above: Annotated[float, Field(gt=1.0)] = 1.2
    """The fleet grows when its demand exceeds its size so many times."""
    shrink_below: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.7
    """The fleet may shrink when the smaller fleet's demand would be below this share of it."""
    high_fast_share: Share = 0.3
    """Mean share of time in fast mode above which one more replica is asked for."""
    low_fast_share: Share = 0.02
    """Mean share of time in fast mode above which the fleet does not shrink."""
    high_waiting: Positive = 4.0
    """Mean requests waiting, per replica, above which one more replica is asked for."""
    low_waiting: Annotated[float, Field(ge=0.0)] = 0.5
    """Mean requests waiting, per replica, above which the fleet does not shrink."""
    max_step_up: Annotated[int, Field(ge=1)] = 2
    """Most replicas starting at once."""
    max_step_down: Annotated[int, Field(ge=1)] = 1
    """Most replicas removed at once."""
    calm_s: Positive = 600.0
    """How long the smaller fleet must have been enough before the fleet shrinks, seconds. It starts
    anew whenever the size changes. A restoring replica, or one that holds requests of precision
    floor ``full``, only postpones the step: Serve chooses which replica stops."""
    idle_s: Positive = 900.0
    """How long nothing must have been asked of the last replica before it stops, seconds. It
    matters only when ``min_replicas`` is 0."""
    silent_after_s: Positive = 25.0
    """Age after which a replica's figures count as unknown, seconds. A fleet with a silent replica
    does not shrink."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        for low, high in (("low_fast_share", "high_fast_share"), ("low_waiting", "high_waiting")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"{low} ({getattr(self, low)}) must be below {high} ({getattr(self, high)}), "
                    "or the fleet would grow and shrink in turn"
                )
        return self


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica has said of itself; ``None`` is unknown."""

    pressure: float | None = None
    """Mean KV demand, as a share of base blocks; above 1 only memory lent by the weights serves
    it."""
    fast_share: float | None = None
    """Mean share of time in fast mode."""
    waiting: float | None = None
    """Mean requests waiting in the engine."""
    restoring: bool | None = None
    """Latest, not a mean."""
    full_requests: float | None = None
    """Requests that insist on full precision, latest."""

    @property
    def must_stay(self) -> bool:
        """Whether stopping this replica now would waste a restore or cut a promise."""
        return bool(self.restoring) or bool(self.full_requests)


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """One reading of a deployment."""

    replicas: Sequence[ReplicaLoad | None]
    """Running replicas; ``None`` for a silent one."""
    target: int
    """Replicas that Serve wants now; more than run while some start."""
    minimum: int
    maximum: int
    requests: float
    """Mean requests running and queued anywhere."""
    queued: float
    """Mean requests queued before any replica."""
    target_requests: float
    """Requests that one replica is sized for."""


class Reason(StrEnum):
    """Why the size is what it is."""

    DEMAND = "demand"
    """KV memory or requests want more replicas."""
    FAST = "fast"
    """Full precision is missed for too long."""
    WAITING = "waiting"
    """Requests wait in spite of free memory."""
    STEADY = "steady"
    CALM = "calm"
    """Fewer replicas have been enough for long."""
    IDLE = "idle"
    """Nothing has been asked for long."""
    HELD = "held"
    """As ``calm`` or ``idle``, but some replica must stay."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What must be remembered between two decisions. Losing it only delays a step down."""

    target: int | None = None
    calm_since_s: float | None = None
    idle_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The wanted size, why, and what to remember."""

    replicas: int
    reason: Reason
    memory: Memory


class Scaler:
    """Decides from one reading at a time; the caller keeps ``Memory`` and the clock.

    Why it does not flap: the fleet grows to where demand is at most its size, and shrinks only to
    where demand is below ``shrink_below`` of the smaller size, so that a constant demand ends in a
    constant size; and two steps down, or a step up and the next one down, lie at least ``calm_s``
    apart. Replicas that are still starting count against ``max_step_up``, so that a slow start
    does not add replica after replica.
    """

    def __init__(self, options: ScalingOptions) -> None:
        self.options = options

    def decide(self, load: FleetLoad, memory: Memory, now_s: float) -> Decision:
        """Return the size that is wanted at ``now_s`` (seconds on any steady clock)."""
        demand = self.demand(load)
        resized = memory.target != load.target
        calm_since_s = self._since(
            self._is_calm(load, demand), None if resized else memory.calm_since_s, now_s
        )
        idle_since_s = self._since(_is_idle(load), None if resized else memory.idle_since_s, now_s)
        replicas, reason = self._grow(load, demand)
        if reason is Reason.STEADY:
            replicas, reason = self._shrink(load, demand, now_s, calm_since_s, idle_since_s)
        replicas = min(max(replicas, load.minimum), load.maximum)
        if replicas == load.target and reason is not Reason.HELD:
            reason = Reason.STEADY
        return Decision(replicas, reason, Memory(load.target, calm_since_s, idle_since_s))

    def demand(self, load: FleetLoad) -> float:
        """Replicas' worth of work: the larger of what KV memory and requests ask for."""
        by_requests = load.requests / load.target_requests
        pressure = _mean([replica.pressure for replica in _known(load)])
        if pressure is None:
            return by_requests
        return max(by_requests, len(load.replicas) * pressure / self.options.target_pressure)

    def _grow(self, load: FleetLoad, demand: float) -> tuple[int, Reason]:
        running = len(load.replicas)
        if running == 0:
            wanted = max(load.target, 1) if load.requests > 0 else load.target
            return wanted, Reason.DEMAND if wanted > load.target else Reason.STEADY
        wanted, reason = load.target, Reason.STEADY
        fast_share = _mean([replica.fast_share for replica in _known(load)])
        if demand > running * self.options.grow_above:
            wanted, reason = math.ceil(demand), Reason.DEMAND
        elif fast_share is not None and fast_share > self.options.high_fast_share:
            wanted, reason = running + 1, Reason.FAST
        elif _waiting(load) > self.options.high_waiting:
            wanted, reason = running + 1, Reason.WAITING
        wanted = min(wanted, running + self.options.max_step_up, load.maximum)
        # While new replicas start the others' figures ask for what is already on its way.
        return (wanted, reason) if wanted > load.target else (load.target, Reason.STEADY)

    def _shrink(
        self,
        load: FleetLoad,
        demand: float,
        now_s: float,
        calm_since_s: float | None,
        idle_since_s: float | None,
    ) -> tuple[int, Reason]:
        options, running = self.options, len(load.replicas)
        held = any(replica.must_stay for replica in _known(load))
        if running == 1 and idle_since_s is not None and now_s - idle_since_s >= options.idle_s:
            return (1, Reason.HELD) if held else (0, Reason.IDLE)
        if calm_since_s is None or now_s - calm_since_s < options.calm_s:
            return load.target, Reason.STEADY
        smallest = max(self._fits(demand), running - options.max_step_down, load.minimum)
        if smallest >= running:
            return load.target, Reason.STEADY
        return (load.target, Reason.HELD) if held else (smallest, Reason.CALM)

    def _is_calm(self, load: FleetLoad, demand: float) -> bool:
        """Whether a smaller fleet would do and everything that could object has been heard."""
        running = len(load.replicas)
        if running < 2 or running != load.target or None in load.replicas:
            return False
        fast_share = _mean([replica.fast_share for replica in _known(load)])
        return (
            self._fits(demand) < running
            and (fast_share is None or fast_share <= self.options.low_fast_share)
            and _waiting(load) <= self.options.low_waiting
        )

    def _fits(self, demand: float) -> int:
        """Fewest replicas, at least one, that stay clear of growing again under ``demand``."""
        return max(1, math.floor(demand / self.options.shrink_below) + 1)

    @staticmethod
    def _since(holds: bool, since_s: float | None, now_s: float) -> float | None:
        if not holds:
            return None
        return now_s if since_s is None else since_s


def _is_idle(load: FleetLoad) -> bool:
    return (
        len(load.replicas) == load.target == 1
        and load.requests == 0
        and None not in load.replicas
        and _waiting(load) == 0
    )


def _known(load: FleetLoad) -> list[ReplicaLoad]:
    return [replica for replica in load.replicas if replica is not None]


def _waiting(load: FleetLoad) -> float:
    """Requests waiting per running replica, in engines and before them."""
    in_engine = _mean([replica.waiting for replica in _known(load)]) or 0.0
    return in_engine + load.queued / max(1, len(load.replicas))


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of what is known; ``None`` when nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
