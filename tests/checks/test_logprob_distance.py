"""How far two engines' answers are apart, as long as they read the same text."""

import pytest

from dps_ray.checks.requests import logprob_distance

Steps = list[list[tuple[int, str]]]


def answer(tokens: list[int], steps: list[dict[int, float]]) -> dict[str, list]:
    logprobs: Steps = [[(token, value.hex()) for token, value in step.items()] for step in steps]
    return {"tokens": [tokens], "logprobs": [logprobs]}


def test_the_largest_difference_of_a_common_token_counts() -> None:
    one = answer([5, 5], [{5: -0.5, 6: -1.0}, {5: -0.5, 6: -1.0}])
    other = answer([5, 5], [{5: -0.5, 7: -9.0}, {5: -0.75, 6: -1.125}])
    assert logprob_distance(one, other) == pytest.approx(0.25)


def test_steps_after_a_different_choice_are_left_out() -> None:
    one = answer([5, 6, 8], [{5: -0.5}, {6: -0.7, 7: -0.8}, {8: -1.0}])
    other = answer([5, 7, 8], [{5: -0.5}, {6: -0.75, 7: -0.7}, {8: -5.0}])
    assert logprob_distance(one, other) == pytest.approx(0.1)
