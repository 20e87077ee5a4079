"""What counts as flapping."""

from dps_autoscaling.scaler import ScalingOptions
from dps_autoscaling.steps import Step, hasty, steps_of, turns, unbounded
from hypothesis import given
from hypothesis import strategies as st

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=30)


def series(*wanted: int) -> list[tuple[float, int]]:
    return [(float(second), size) for second, size in enumerate(wanted)]


def test_a_burst_costs_one_turn_however_many_steps_it_takes() -> None:
    assert turns(steps_of(series(1, 2, 2, 3, 3, 3, 2, 2, 1))) == 1


def test_growing_again_after_a_step_down_is_a_second_turn() -> None:
    assert turns(steps_of(series(1, 3, 2, 3, 1))) == 3


def test_step_down_is_hasty_after_any_step_and_a_step_up_never_is() -> None:
    up, soon, later = Step(10.0, 2), Step(29.0, -1), Step(50.0, -1)
    assert hasty([up, soon, later], calm_s=20.0) == [soon]
    assert hasty([later, Step(51.0, 2)], calm_s=20.0) == []


def test_steps_are_bounded_in_their_own_direction() -> None:
    options = ScalingOptions(max_step_up=2, max_step_down=1)
    steps = [Step(0.0, 2), Step(1.0, 3), Step(2.0, -1), Step(3.0, -2)]
    assert unbounded(steps, options) == [steps[1], steps[3]]


@given(sizes)
def test_steps_lead_from_the_first_size_to_the_last_and_none_is_empty(wanted: list[int]) -> None:
    steps = steps_of(series(*wanted))
    assert wanted[0] + sum(step.replicas for step in steps) == wanted[-1]
    assert all(step.replicas for step in steps)


@given(sizes)
def test_a_fleet_that_only_grows_and_then_only_shrinks_never_flaps(wanted: list[int]) -> None:
    assert turns(steps_of(series(*sorted(wanted), *sorted(wanted, reverse=True)))) <= 1


@given(sizes, st.integers(1, 6), st.integers(1, 6))
def test_every_dip_costs_two_more_turns(wanted: list[int], low: int, depth: int) -> None:
    before = [*sorted(wanted), 6 + low]
    dipped = [*before, 6 + low - depth, 6 + low, 0]
    assert turns(steps_of(series(*dipped))) == turns(steps_of(series(*before, 0))) + 2
