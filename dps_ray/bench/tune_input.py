"""What ``dps-ray tune`` is told: costs from a file, occupancy and the rest from a run."""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dps_ray.config import DpsConfigError, DpsOptions, faults_of
from dps_ray.scheduling.occupancy import fitted_walk, random_walk
from dps_ray.scheduling.tuning import ReplicaCosts

Cost = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Chance = Annotated[float, Field(ge=0.0, le=1.0)]


class Walk(BaseModel):
    """Occupancy described: chances of one period."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_blocks: Positive
    """Blocks by which occupancy moves up or down."""
    up: Chance
    down: Chance
    burst: Chance = 0.0
    burst_blocks: Cost = 0.0


class TuneInput(BaseModel):
    """Costs of one replica in milliseconds of step time, and how its occupancy moves."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_blocks: Annotated[int, Field(gt=0)]
    """KV blocks without lending."""
    total_blocks: Annotated[int, Field(gt=0)]
    """KV blocks with every unit lent."""
    period_s: Positive
    """Distance of two decisions, seconds."""
    horizon_s: Positive = 60.0
    """How far ahead costs count: after this time by a factor of e less."""
    step_full_ms: tuple[Positive, Positive]
    """Step time in full mode with an empty cache and with all blocks in use."""
    step_fast_ms: tuple[Positive, Positive]
    """The same in fast mode."""
    preemption_ms_per_block: Cost
    """What a block that full mode cannot hold costs a period."""
    accuracy_ms: Cost
    """Step time that one step in full precision is worth over one in fast mode."""
    switch_to_fast_ms: Cost = 0.0
    switch_to_full_ms: Cost
    """Step time that one restore costs the steps beside it."""
    walk: Walk | None = None
    used_blocks: tuple[tuple[float, ...], ...] | None = None
    """Measured occupancy, a period apart, one sequence a replica."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.total_blocks <= self.base_blocks:
            raise ValueError(
                f"total_blocks ({self.total_blocks}) must exceed base_blocks ({self.base_blocks})"
            )
        if (self.walk is None) == (self.used_blocks is None):
            raise ValueError("give either walk or used_blocks (a run's summary has the latter)")
        return self

    @property
    def costs(self) -> ReplicaCosts:
        """Costs of one period."""
        return ReplicaCosts(
            base_blocks=self.base_blocks,
            total_blocks=self.total_blocks,
            step_full_ms=self.step_full_ms,
            step_fast_ms=self.step_fast_ms,
            steps_per_period=1000.0 * self.period_s / float(np.mean(self.step_full_ms)),
            preemption_ms_per_block=self.preemption_ms_per_block,
            accuracy_ms=self.accuracy_ms,
            switch_to_fast_ms=self.switch_to_fast_ms,
            switch_to_full_ms=self.switch_to_full_ms,
        )

    @property
    def discount(self) -> float:
        """Weight of the next period against this one."""
        return math.exp(-self.period_s / self.horizon_s)

    def kernel(self, levels: int) -> NDArray[np.float64]:
        """How occupancy moves, ``[levels, levels]``."""
        per_block = (levels - 1) / self.total_blocks
        if self.walk is not None:
            step = self.walk.step_blocks * per_block
            # A coarser grid moves a level less often than occupancy moves a step.
            rate = min(1.0, step)
            return random_walk(
                levels,
                up=self.walk.up * rate,
                down=self.walk.down * rate,
                burst=self.walk.burst,
                burst_levels=round(self.walk.burst_blocks * per_block),
            )
        assert self.used_blocks is not None
        return fitted_walk(levels, [[used * per_block for used in one] for one in self.used_blocks])


def read_input(costs: Path, run: Path | None) -> TuneInput:
    """Read costs, filled up with what a run's summary measured; the file wins.

    Parameters
    ----------
    costs
        YAML or JSON with fields of ``TuneInput``.
    run
        ``summary.json`` of ``dps-ray demo``.

    Raises
    ------
    DpsConfigError
        One line that names the file, the field and the remedy.
    """
    given = _mapping(costs)
    measured = {} if run is None else _measured(run)
    if "walk" in given:
        measured.pop("used_blocks", None)
    try:
        return TuneInput.model_validate({**measured, **given})
    except ValidationError as error:
        raise DpsConfigError(*faults_of(error, str(costs))) from None


def _measured(run: Path) -> dict[str, Any]:
    elastic = _mapping(run).get("elastic")
    if not isinstance(elastic, dict) or not elastic.get("occupancy"):
        raise DpsConfigError(
            f"{run} has no elastic.occupancy: give the summary.json of a dps-ray demo"
        )
    seen = dict(elastic["occupancy"])
    returns, busy_s = elastic.get("switches_to_full"), elastic.get("restore_busy_s")
    if returns is None or busy_s is None:
        raise DpsConfigError(
            f"{run} has no elastic.switches_to_full and elastic.restore_busy_s: give the "
            "summary.json of a dps-ray demo"
        )
    if returns:
        # While it copies, pacing lets the steps stretch by this share.
        share = DpsOptions().restore_max_inflation
        seen["switch_to_full_ms"] = 1000.0 * busy_s / returns * share
    return seen


def _mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        read = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise DpsConfigError(f"{path} cannot be read ({problem}): give YAML or JSON") from None
    if not isinstance(read, dict):
        raise DpsConfigError(f"{path} holds no mapping: give fields and values")
    return read
