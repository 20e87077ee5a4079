"""What ``dps-ray tune`` is told: costs from a file, occupancy and the rest from a run."""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.faults import faults_of
from dps_ray.modes import Mode
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
    accuracy_ms: Cost | None = None
    """Step time that one step in full precision is worth over one in fast mode."""
    accuracy_ms_per_nat: Cost | None = None
    """The same for each nat of divergence between both modes: a price for what was measured."""
    fast_divergence_nats: Cost | None = None
    """Divergence of fast mode from the 16-bit model, nats a token."""
    switch_to_fast_ms: Cost = 0.0
    switch_to_full_ms: Cost
    """Step time that one restore costs the steps beside it, or held up by it."""
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
        if self.accuracy_ms is None and None in (
            self.accuracy_ms_per_nat, self.fast_divergence_nats
        ):  # fmt: skip
            raise ValueError(
                "give accuracy_ms, or accuracy_ms_per_nat and fast_divergence_nats (bench layers "
                "measures the latter)"
            )
        return self

    @property
    def accuracy_cost_ms(self) -> float:
        """What a step in fast mode loses, in step time."""
        if self.accuracy_ms is not None:
            return self.accuracy_ms
        assert self.accuracy_ms_per_nat is not None
        assert self.fast_divergence_nats is not None
        return self.accuracy_ms_per_nat * self.fast_divergence_nats

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
            accuracy_ms=self.accuracy_cost_ms,
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


def read_input(
    costs: Path, run: Path | None, speed: Path | None = None, layers: Path | None = None
) -> TuneInput:
    """Read costs, filled up with what runs have measured; the file wins.

    Parameters
    ----------
    costs
        YAML or JSON with fields of ``TuneInput``.
    run
        ``summary.json`` of ``dps-ray demo``.
    speed
        What ``dps-ray bench engine --json`` printed: step times, of the first model in it.
    layers
        What ``dps-ray bench layers --json`` printed: divergence of fast mode.

    Raises
    ------
    DpsConfigError
        One line that names the file, the field and the remedy.
    """
    given = _mapping(costs)
    measured: dict[str, Any] = {}
    if run is not None:
        measured |= _of_a_run(run)
    if speed is not None:
        measured |= _step_times(speed)
    if layers is not None:
        measured |= _divergence(layers)
    if "walk" in given:
        measured.pop("used_blocks", None)
    try:
        return TuneInput.model_validate({**measured, **given})
    except ValidationError as error:
        raise DpsConfigError(*faults_of(error, str(costs))) from None


def _of_a_run(run: Path) -> dict[str, Any]:
    summary = _mapping(run)
    elastic = summary.get("elastic")
    if not isinstance(elastic, dict) or not elastic.get("occupancy"):
        raise DpsConfigError(
            f"{run} has no elastic.occupancy: give the summary.json of a dps-ray demo"
        )
    seen = dict(elastic["occupancy"])
    returns, busy_s = elastic.get("switches_to_full"), elastic.get("restore_busy_s")
    options = summary.get("dps_options")
    if returns is None or busy_s is None or not isinstance(options, dict):
        raise DpsConfigError(
            f"{run} has no elastic.switches_to_full, elastic.restore_busy_s and dps_options: give "
            "the summary.json of a dps-ray demo"
        )
    if returns:
        # While copies run beside steps, pacing lets these stretch by this share. Too little for
        # hosts, whose slices run between steps: the table of fields says what to give there.
        try:
            share = DpsOptions(**options).restore_max_inflation
        except ValidationError as error:
            raise DpsConfigError(*faults_of(error, f"{run}.dps_options")) from None
        seen["switch_to_full_ms"] = 1000.0 * busy_s / returns * share
    return seen


def _step_times(speed: Path) -> dict[str, Any]:
    """Time of a decode step with the smallest batch and with the largest."""
    try:
        rows = _mapping(speed)["rows"]
        rows = sorted(
            (row for row in rows if row["model"] == rows[0]["model"]), key=lambda row: row["batch"]
        )
        return {
            f"step_{mode}_ms": tuple(
                1000.0 * row["batch"] / row["tokens_per_s"][mode]["median"]
                for row in (rows[0], rows[-1])
            )
            for mode in Mode
        }
    except (KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise DpsConfigError(
            f"{speed} has no decode speeds ({type(error).__name__}: {error}): give what "
            "dps-ray bench engine --json printed"
        ) from None


def _divergence(layers: Path) -> dict[str, Any]:
    """Divergence of fast mode from the 16-bit model, nats a token."""
    try:
        rows = _mapping(layers)["by_layers"]
        return {
            "fast_divergence_nats": next(row["kl"]["median"] for row in rows if not row["layers"])
        }
    except (KeyError, TypeError, StopIteration) as error:
        raise DpsConfigError(
            f"{layers} has no divergence without full layers ({type(error).__name__}: {error}): "
            "give what dps-ray bench layers --json printed"
        ) from None


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
