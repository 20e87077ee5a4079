"""Runs soaks in processes of their own: one that reads memory which is gone ends alone."""

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ProcessDiedError(Exception):
    """The process of a function ended before the function did.

    Parameters
    ----------
    name
        Of the function.
    exitcode
        Negative: the signal that ended the process.
    """

    def __init__(self, name: str, exitcode: int) -> None:
        self.signal = signal.Signals(-exitcode) if exitcode < 0 else None
        cause = self.signal.name if self.signal else f"exit status {exitcode}"
        super().__init__(f"the process of {name} died: {cause}")


def run_apart(function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Result of a function that, like its arguments, can be pickled; callable by any thread.

    Its process is forked off one that has imported what soaks need, which takes seconds.

    Raises
    ------
    ProcessDiedError
        When its process died, as of a signal.
    Exception
        That of the function.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dps_ray.checks.soak_run"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args, options))
    process.start()
    sender.close()
    try:
        result, failure = receiver.recv()
    except EOFError:
        process.join()
        raise ProcessDiedError(function.__name__, process.exitcode or 0) from None
    process.join()
    if failure is not None:
        raise failure
    answer: R = result
    return answer


def _answer(
    sender: Connection, function: Callable[..., Any], args: Any, options: dict[str, Any]
) -> None:
    answer: Any = None
    failure: Exception | None = None
    try:
        answer = function(*args, **options)
    except Exception as error:
        failure = error
    sender.send((answer, failure))
