"""A process for each call."""

import os
import signal

import pytest

from dps_ray.checks.soak_process import ProcessDiedError, run_apart


def test_a_call_that_dies_is_told_from_one_that_fails_and_the_next_one_runs() -> None:
    with pytest.raises(ProcessDiedError, match="the process of _exit died: exit status 3"):
        run_apart(os._exit, 3)
    with pytest.raises(ProcessDiedError, match="died: SIGSEGV") as death:
        run_apart(signal.raise_signal, signal.SIGSEGV)
    assert death.value.signal is signal.SIGSEGV
    with pytest.raises(ValueError, match="invalid literal"):
        run_apart(int, "many")
    assert run_apart(int, "7") == 7
