"""From costs to watermarks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_ray.config import DpsOptions
from dps_ray.scheduling.occupancy import random_walk
from dps_ray.scheduling.tuning import ReplicaCosts, Tuning, Watermarks, tune

LEVELS = 61
COSTS = ReplicaCosts(
    base_blocks=1000,
    total_blocks=1600,
    step_full_ms=(18.0, 30.0),
    step_fast_ms=(14.0, 24.0),
    steps_per_period=1.0,
    preemption_ms_per_block=0.5,
    accuracy_ms=8.0,
    switch_to_fast_ms=1.0,
    switch_to_full_ms=60.0,
)
WALK = random_walk(LEVELS, up=0.2, down=0.25, burst=0.01, burst_levels=20)


def tuned(**changes: object) -> Tuning:
    return tune(replace(COSTS, **changes), WALK, 0.99)  # type: ignore[arg-type]


def test_what_full_mode_cannot_hold_makes_it_go_fast_near_the_end_of_base_memory() -> None:
    found = tuned().watermarks
    assert 0.8 < found.high <= 1.0
    assert found.low < found.high - 0.05


def test_dearer_returns_widen_the_gap_and_dearer_accuracy_raises_both() -> None:
    plain, dear_return, dear_accuracy = (
        tuned().solution.thresholds,
        tuned(switch_to_full_ms=600.0).solution.thresholds,
        tuned(accuracy_ms=16.0).solution.thresholds,
    )
    assert dear_return.to_full < plain.to_full
    assert dear_accuracy.to_fast >= plain.to_fast
    assert dear_accuracy.to_full > plain.to_full


def test_fast_mode_that_costs_nothing_is_never_left() -> None:
    found = tuned(accuracy_ms=0.0)
    assert found.solution.thresholds.to_fast == 0
    assert found.watermarks.low == 0.0


@settings(max_examples=30, deadline=None)
@given(
    accuracy_ms=st.floats(0, 40), switch_to_full_ms=st.floats(0, 2000),
    preemption_ms_per_block=st.floats(0, 5),
)  # fmt: skip
def test_watermarks_are_options_the_engine_accepts(**changes: float) -> None:
    found = tuned(**changes).watermarks
    if found.high > 0.0:
        DpsOptions(high_watermark=found.high, low_watermark=found.low)


@settings(max_examples=30, deadline=None)
@given(level=st.integers(0, LEVELS - 1))
def test_a_watermark_read_off_a_level_acts_at_that_level(level: int) -> None:
    found = tuned()
    share = COSTS.share_of_base(level, LEVELS)
    acting = found.thresholds_of(Watermarks(share, share))
    assert (acting.to_fast, acting.to_full) == (level, level)


def test_the_optimum_loses_nothing_and_the_defaults_no_more_than_their_bound() -> None:
    found = tuned()
    levels = found.solution.thresholds
    best = found.compare(
        Watermarks(
            COSTS.share_of_base(levels.to_fast, LEVELS), COSTS.share_of_base(levels.to_full, LEVELS)
        )
    )
    assert best.loss == pytest.approx(0.0, abs=1e-6)
    assert best.bound == pytest.approx(0.0, abs=1e-4)
    defaults = found.compare(Watermarks(1.0, 0.6))
    assert 0.0 <= defaults.loss <= defaults.bound
