"""Runs soaks in processes of their own: one that reads memory which is gone ends alone."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ProcessDiedError(Exception):
    """The process of a function ended before the function did."""


def run_apart(function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Result of a function that, like its arguments, can be pickled; callable by any thread.

    Its process is forked off one that has imported what soaks need, which takes seconds.

    Raises
    ------
    ProcessDiedError
        When its process died, as of a signal.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dps_ray.checks.soak_run"])
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(function, *args, **options).result()
        except BrokenProcessPool as error:
            raise ProcessDiedError(f"the process of {function.__name__} died") from error
