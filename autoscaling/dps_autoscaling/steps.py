"""How a fleet's wanted size moved over time, and whether it flapped."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dps_autoscaling.scaler import ScalingOptions


@dataclass(frozen=True, slots=True)
class Step:
    """One change of the wanted size."""

    time_s: float
    replicas: int
    """How many more are wanted; below 0, how many fewer."""


def steps_of(sizes: Sequence[tuple[float, int]]) -> list[Step]:
    """The changes in a series of ``(time in seconds, wanted replicas)``, in order of time."""
    return [
        Step(time_s, size - before)
        for (_, before), (time_s, size) in pairwise(sizes)
        if size != before
    ]


def turns(steps: Sequence[Step]) -> int:
    """How often the direction changed. One burst costs one turn: up, then down."""
    return sum((before.replicas > 0) != (step.replicas > 0) for before, step in pairwise(steps))


def hasty(steps: Sequence[Step], calm_s: float) -> list[Step]:
    """Steps down within ``calm_s`` of the step before them."""
    return [
        step
        for before, step in pairwise(steps)
        if step.replicas < 0 and step.time_s - before.time_s < calm_s
    ]


def unbounded(steps: Sequence[Step], options: ScalingOptions) -> list[Step]:
    """Steps larger than ``max_step_up`` or ``max_step_down``."""
    return [
        step for step in steps if not -options.max_step_down <= step.replicas <= options.max_step_up
    ]
