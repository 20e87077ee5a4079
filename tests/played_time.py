"""Time that passes only while nothing is ready to run.

What waits for a moment gets there at once, and nothing is late because the machine was busy.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

START_S = 1000.0

T = TypeVar("T")


class _Clock(selectors.DefaultSelector):
    """Moves on by what an event loop would have slept."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S

    def read(self) -> float:
        return self.now_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else 0)
        if not events and timeout is not None:
            self.now_s += max(0.0, timeout)
        return events


def run(monkeypatch: pytest.MonkeyPatch, play: Coroutine[Any, Any, T]) -> T:
    """Run a play in which no other thread has a part."""
    clock = _Clock()
    with monkeypatch.context() as patch:
        for name in ("monotonic", "time"):
            patch.setattr(time, name, clock.read)
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
            return runner.run(play)
