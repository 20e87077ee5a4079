"""A process for each call."""

import os

import pytest

from dps_ray.checks.apart import Apart, ProcessDiedError


def test_a_call_that_dies_is_told_from_one_that_fails_and_the_next_one_runs() -> None:
    apart = Apart("dps_ray.checks.apart")
    with pytest.raises(ProcessDiedError, match="the process of _exit died"):
        apart.run(os._exit, 3)
    with pytest.raises(ValueError, match="invalid literal"):
        apart.run(int, "many")
    assert apart.run(int, "7") == 7
