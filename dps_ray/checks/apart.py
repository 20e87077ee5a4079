"""Runs functions in processes of their own: one that reads memory which is gone ends alone."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ProcessDiedError(Exception):
    """The process of a function ended before the function did."""


class Apart:
    """Forks a process for each call from one server process that has imported what calls need.

    Parameters
    ----------
    module
        What the server imports, once.
    """

    def __init__(self, module: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([module])

    def run(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Result of a function that, like its arguments, can be pickled; callable by any thread.

        Raises
        ------
        ProcessDiedError
            When its process died, as of a signal.
        """
        with ProcessPoolExecutor(1, self._context) as pool:
            try:
                return pool.submit(function, *args, **options).result()
            except BrokenProcessPool as error:
                raise ProcessDiedError(f"the process of {function.__name__} died") from error
