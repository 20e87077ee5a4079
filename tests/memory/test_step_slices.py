"""The budget of what steps' threads copy: a share of the steps' time, whatever the memory does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.memory.checksum import ROW_BYTES
from dps_ray.memory.step_slices import StepSlices

MAX_INFLATION = 0.05


def run(
    slices: StepSlices, steps_s: list[float], bytes_per_s: float, overhead_s: float = 0.0
) -> tuple[int, list[float]]:
    """Bytes copied, and the time of each step's slice."""
    copied, times_s = 0, []
    for step_s in steps_s:
        slices.step_ended(step_s)
        nbytes = slices.nbytes
        times_s.append(0.0)
        if nbytes:
            times_s[-1] = overhead_s + nbytes / bytes_per_s
            slices.copied(nbytes, times_s[-1])
        copied += nbytes
    return copied, times_s


@given(
    step_s=st.floats(1e-3, 0.5), bytes_per_s=st.floats(1e9, 1e11), overhead_s=st.floats(0.0, 2e-5)
)
def test_slices_take_half_of_the_allowed_share_of_the_steps(
    step_s: float, bytes_per_s: float, overhead_s: float
) -> None:
    slices = StepSlices(max_inflation=MAX_INFLATION, floor_bytes_per_s=1.0)
    _, times_s = run(slices, [step_s] * 200, bytes_per_s, overhead_s)
    settled = times_s[50:]
    assert sum(settled) == pytest.approx(150 * step_s * MAX_INFLATION / 2, rel=0.25)
    assert max(settled) < 0.75 * step_s * MAX_INFLATION + overhead_s


@given(st.lists(st.floats(1e-5, 1.0), min_size=1))
def test_steps_that_copied_nothing_save_nothing_up(steps_s: list[float]) -> None:
    slices = StepSlices(max_inflation=MAX_INFLATION, floor_bytes_per_s=1.0)
    run(slices, [1e-3] * 100, 1e10)
    for step_s in steps_s:
        slices.step_ended(step_s)
    slices.step_ended(1e-3)
    assert slices.nbytes <= 1.1e10 * 1e-3 * MAX_INFLATION / 2 + ROW_BYTES


@given(bytes_per_s=st.floats(2e8, 1e10), delay_s=st.floats(0.0, 0.05))
def test_the_floor_is_kept_whatever_slices_cost(bytes_per_s: float, delay_s: float) -> None:
    slices = StepSlices(max_inflation=MAX_INFLATION, floor_bytes_per_s=64e6)
    copied, _ = run(slices, [0.01] * 500, bytes_per_s, delay_s)
    assert copied >= 0.99 * 64e6 * 500 * 0.01


def test_the_cap_is_kept_by_the_fastest_memory() -> None:
    slices = StepSlices(max_inflation=MAX_INFLATION, floor_bytes_per_s=1e6, cap_bytes_per_s=64e6)
    copied, _ = run(slices, [0.01] * 500, 1e10)
    assert copied == pytest.approx(64e6 * 500 * 0.01, rel=0.1)


def test_the_shortest_steps_still_bring_a_restore_to_its_end() -> None:
    slices = StepSlices(max_inflation=MAX_INFLATION, floor_bytes_per_s=1.0)
    copied, _ = run(slices, [1e-6] * 10_000, 1e9)
    assert copied > 0


def test_a_slice_that_took_long_is_paid_for_by_the_next_ones_but_only_by_a_few() -> None:
    slices = StepSlices(max_inflation=MAX_INFLATION, floor_bytes_per_s=1.0)
    run(slices, [0.01] * 50, 1e10)
    slices.step_ended(0.01)
    slices.copied(slices.nbytes, 1.0)
    _, times_s = run(slices, [0.01] * 10, 1e10)
    assert times_s[0] == 0.0
    assert any(times_s)
