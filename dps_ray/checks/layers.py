"""Layers chosen by hand to run in full precision within fast steps, on static memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dps_ray.checks.engine import Engine
from dps_ray.modes import Mode


@contextmanager
def full_layers(engine: Engine, layers: Sequence[int]) -> Iterator[None]:
    """Let every step be a fast one in which ``layers`` run in full precision.

    For an engine that lends nothing and has ``return_by`` ``layer``: all its residual is in place.
    """
    schedule = engine.scheduler.schedule

    def chosen(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        output.dps = replace(output.dps, mode=Mode.FAST, full_layers=tuple(layers))
        return output

    engine.scheduler.schedule = chosen
    try:
        yield
    finally:
        engine.scheduler.schedule = schedule
