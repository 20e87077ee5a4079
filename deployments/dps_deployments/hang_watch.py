"""Notices an engine that hangs without dying: a rank that is stopped, a collective that waits."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import psutil


class HangWatch:
    """Asks all ranks for a sign of life, and gives up on those that give none.

    An engine that works answers only between two steps, so that asking costs it a little; one whose
    status shows a new step needs no asking, as no step ends without all ranks.

    Parameters
    ----------
    ask
        Ends when every rank has answered.
    read_step
        Something that changes again and again while steps end; ``None`` where that is not known.
    limit_s
        Longest time without an answer and without a step, seconds.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        read_step: Callable[[], int | None],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._read_step = read_step
        self._limit_s = limit_s
        self._clock = clock
        self._step: int | None = None
        self._asked: asyncio.Future[object] | None = None
        self._silent_since_s = clock()

    def look(self) -> str | None:
        """Ask where that is needed; why the engine is given up, or ``None``. Call it often."""
        now_s = self._clock()
        step = self._read_step()
        if step != self._step:
            self._step = step
            self._silent_since_s = now_s
            return None
        if self._asked is None or self._asked.done():
            self._silent_since_s = now_s
            self._asked = asyncio.ensure_future(self._ask())
            self._asked.add_done_callback(_hear)
        silent_s = now_s - self._silent_since_s
        if silent_s < self._limit_s:
            return None
        return f"it hangs: no step has ended and not every rank has answered for {silent_s:.0f} s"


def _hear(answer: asyncio.Future[object]) -> None:
    """A failed answer is one too: the engine's own health tells what it means."""
    if not answer.cancelled():
        answer.exception()


def kill_engine() -> None:
    """End all processes of this replica's engine: those that descend from the replica's own.

    A stopped rank never ends by itself and would keep its memory, and the requests that wait for
    the engine go elsewhere only when it is dead.

    Ranks on GPUs are none of them: ``ray.serve.llm`` makes them Ray actors, which are left to Ray,
    as is a stopped one among them.
    """
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            # Python's own, which ends last: it removes the others' shared memory.
            if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
