"""Callers that are not answered call less and less often, and never all at once."""

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.fleet.backoff import Backoff

TIMEOUT_S = 2.0
PERIOD_S = 1.0

draws = st.floats(0.0, 1.0)


@given(st.floats(0.01, 5.0), st.floats(1.0, 100.0), st.lists(st.none() | draws, max_size=60))
def test_waits_stay_within_their_steps_and_begin_anew_after_an_answer(
    first_s: float, factor: float, events: list[float | None]
) -> None:
    drawn = 0.0
    backoff = Backoff(first_s, first_s * factor, lambda: drawn)
    failures = 0
    for event in events:
        if event is None:
            backoff.succeeded()
            failures = 0
            continue
        drawn = event
        step_s = min(first_s * 2.0**failures, first_s * factor)
        assert step_s / 2.0 <= backoff.failed() <= step_s
        failures += 1


def test_impossible_waits_are_refused_with_both_values() -> None:
    with pytest.raises(ValueError, match=r"first_s is 2 and longest_s is 1: give"):
        Backoff(2.0, 1.0)


def answered_at_the_end(callers: list[Backoff], service_s: float) -> float:
    """Share of the calls in the last 10 s of a minute that were answered in time.

    All call first at the same moment, as when the controller is back. Calls are taken one by one
    in their order, and one whose caller has given up costs as much as any other.
    """
    calls = [(0.0, caller) for caller in range(len(callers))]
    free_s, outcomes = 0.0, []
    while calls[0][0] < 60.0:
        called_s, caller = heapq.heappop(calls)
        free_s = max(free_s, called_s) + service_s
        in_time = free_s - called_s <= TIMEOUT_S
        if called_s >= 50.0:
            outcomes.append(in_time)
        if in_time:
            callers[caller].succeeded()
            next_s = free_s + PERIOD_S
        else:
            next_s = called_s + TIMEOUT_S + callers[caller].failed()
        heapq.heappush(calls, (next_s, caller))
    return sum(outcomes) / len(outcomes)


@pytest.mark.parametrize("load", [0.5, 1.0, 3.0])
def test_slow_controller_is_in_time_again_although_all_called_at_once(load: float) -> None:
    """A load of 3: reports once a period would take three controllers."""
    rng = random.Random(0)
    count = 300
    callers = [Backoff(0.5, 2.0, rng.random) for _ in range(count)]
    assert answered_at_the_end(callers, load * PERIOD_S / count) == 1.0


def test_without_growing_waits_the_same_controller_answers_nobody() -> None:
    rng = random.Random(0)
    callers = [Backoff(0.5, 0.5, rng.random) for _ in range(300)]
    assert answered_at_the_end(callers, 3.0 * PERIOD_S / 300) == 0.0
