"""An engine core whose memory is coming back waits for requests instead of spinning."""

import inspect
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from dps_ray.engine import idle
from dps_ray.engine.idle import PIN_POLL_S, POLL_S, idle_pause_s, wait_when_idle


class Core(EngineCoreProc):
    """vLLM's input loop without an engine around it; requests are kept as they come."""

    def __init__(
        self, pause_s: float, *, pending: bool = True, live: bool = False, running: bool = True
    ) -> None:
        self.running = running
        self.left_lent = 0
        self.scheduler: Any = SimpleNamespace(
            sum_manager=SimpleNamespace(has_pending_work=pending, idle_pause_s=pause_s),
            has_live_requests=lambda: live,
            has_requests=lambda: live or pending,
            leave_lent=self._leave_lent,
        )
        self.batch_queue = None
        self.engines_running = False
        self.process_input_queue_block = True
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.handled: list[Any] = []

    def _handle_client_request(self, *request: Any) -> None:
        self.handled.append(request)

    def is_running(self) -> bool:
        return self.running

    def _leave_lent(self) -> None:
        self.left_lent += 1


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine of this process may have installed it already.
    stock = inspect.unwrap(EngineCoreProc._process_input_queue)
    monkeypatch.setattr(EngineCoreProc, "_process_input_queue", stock)
    wait_when_idle.__wrapped__()


class Waits(queue.Queue[Any]):
    """A queue on which nothing ever comes; it notes how long it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_s: list[float | None] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.asked_s.append(timeout)
        raise queue.Empty


@pytest.mark.parametrize(
    ("pause_s", "expected_s"), [(0.03, 0.03), (0.0, POLL_S), (60.0, PIN_POLL_S)]
)
def test_core_waits_as_long_as_nothing_can_change(pause_s: float, expected_s: float) -> None:
    core = Core(pause_s)
    core.input_queue = Waits()
    core._process_input_queue()
    assert core.input_queue.asked_s == [expected_s]


def test_request_ends_the_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "PIN_POLL_S", 60.0)
    core = Core(60.0)
    threading.Timer(0.01, core.input_queue.put, [("add", "a request")]).start()
    began_s = time.monotonic()
    core._process_input_queue()
    assert time.monotonic() - began_s < 30.0
    assert core.handled == [("add", "a request")]


@pytest.mark.parametrize(("running", "expected"), [(False, 1), (True, 0)])
def test_only_a_core_told_to_end_gives_up_its_lent_memory(running: bool, expected: int) -> None:
    core = Core(0.001, running=running)
    core._process_input_queue()
    assert core.left_lent == expected


def test_core_with_requests_or_without_pending_memory_is_left_alone() -> None:
    assert idle_pause_s(Core(1.0, live=True)) == 0.0
    assert idle_pause_s(Core(1.0, pending=False)) == 0.0
    plain = Core(1.0)
    plain.scheduler = SimpleNamespace(has_requests=lambda: True)
    assert idle_pause_s(plain) == 0.0
    plain.input_queue = Waits()
    plain._process_input_queue()
    assert plain.input_queue.asked_s == []


@pytest.mark.parametrize(("tokens", "expected_s"), [([0, 3], 0.0), ([0, 0], PIN_POLL_S)])
def test_core_waits_behind_steps_in_flight_only_if_they_compute_nothing(
    tokens: list[int], expected_s: float
) -> None:
    core = Core(1.0)
    core.batch_queue = [
        (None, SimpleNamespace(total_num_scheduled_tokens=count), None) for count in tokens
    ]
    assert idle_pause_s(core) == expected_s
