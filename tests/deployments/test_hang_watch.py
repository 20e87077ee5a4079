"""An engine that hangs is given up in its time; one that is merely busy or idle is not."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from dps_deployments.hang_watch import HangWatch

LIMIT_S = 10.0


class Engine:
    """Plays the ranks and the status page, on a clock of its own."""

    def __init__(self, *, elastic: bool = True) -> None:
        self.now_s = 0.0
        self.step: int | None = 0 if elastic else None
        self.answers = asyncio.Event()
        self.asked = 0
        self.watch = HangWatch(self._ask, lambda: self.step, LIMIT_S, lambda: self.now_s)

    async def _ask(self) -> None:
        self.asked += 1
        await self.answers.wait()

    async def look(self, at_s: float) -> str | None:
        self.now_s = at_s
        cause = self.watch.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return cause


def scenario(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


@pytest.mark.parametrize("elastic", [True, False])
def test_engine_that_neither_steps_nor_answers_is_given_up(elastic: bool) -> None:
    async def body() -> None:
        engine = Engine(elastic=elastic)
        for second in range(int(LIMIT_S)):
            assert await engine.look(float(second)) is None
        cause = await engine.look(LIMIT_S + 1.0)
        assert cause is not None
        assert "it hangs" in cause
        assert engine.asked == 1

    scenario(body)


def test_idle_engine_whose_ranks_answer_is_well_and_is_asked_again() -> None:
    async def body() -> None:
        engine = Engine()
        engine.answers.set()
        for second in range(100):
            assert await engine.look(float(second)) is None
        assert engine.asked > 90
        engine.answers.clear()
        hung_s = [at_s for at_s in range(100, 120) if await engine.look(float(at_s))]
        assert 100 + LIMIT_S <= hung_s[0] <= 102 + LIMIT_S

    scenario(body)


def test_engine_that_steps_is_not_asked_and_a_slow_step_is_waited_for() -> None:
    async def body() -> None:
        engine = Engine()
        for second in range(1, 50):
            engine.step = second
            assert await engine.look(float(second)) is None
        assert engine.asked == 0
        # A step of nine seconds, after which the ranks answer late.
        for second in range(50, 59):
            assert await engine.look(float(second)) is None
        engine.step = 50
        for second in range(59, 68):
            assert await engine.look(float(second)) is None
        assert engine.asked == 1

    scenario(body)


def test_failed_answer_is_an_answer() -> None:
    """Whether the engine is dead is for its own health to say."""

    async def body() -> None:
        async def fail() -> None:
            raise RuntimeError("EngineDead")

        now_s = 0.0
        watch = HangWatch(fail, lambda: None, LIMIT_S, lambda: now_s)
        for now_s in range(30):  # noqa: B007
            assert watch.look() is None
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    scenario(body)


def test_answer_that_fails_after_the_last_look_is_no_error_that_nobody_has_seen() -> None:
    async def body() -> None:
        unseen: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))

        async def fail() -> None:
            raise RuntimeError("EngineDead")

        watch = HangWatch(fail, lambda: None, LIMIT_S)
        watch.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del watch
        gc.collect()
        assert unseen == []

    scenario(body)


REPLICA = """
import contextlib, os, signal, subprocess, sys, time
import psutil
from dps_deployments.hang_watch import kill_engine

CORE = (
    "import subprocess, time;"
    "print(subprocess.Popen(['sleep', '600']).pid, flush=True);"
    "time.sleep(600)"
)
core = subprocess.Popen([sys.executable, "-c", CORE], stdout=subprocess.PIPE)
rank = psutil.Process(int(core.stdout.readline()))
os.kill(rank.pid, signal.SIGSTOP)
kill_engine()
assert core.wait(60) == -signal.SIGKILL
deadline_s = time.monotonic() + 60
# It is a zombie, for a moment or for ever, by who adopts it.
with contextlib.suppress(psutil.NoSuchProcess):
    while rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the stopped process lives on"
        time.sleep(0.01)
"""


def test_stopped_process_of_an_engine_is_ended_with_those_above_it() -> None:
    subprocess.run([sys.executable, "-c", REPLICA], check=True, timeout=300)
