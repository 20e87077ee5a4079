"""An engine core without requests that waits for its memory to come back.

vLLM's core blocks on its queue of requests when it has no work, and otherwise steps as fast as it
can. While residual memory is on its way back, or may start to be soon, an elastic engine has work
but nothing to compute: here it waits on the same queue for a limited time, so that it uses no CPU
and a request still starts at once. A core that was told to end does not wait for its memory at all.
"""

import functools
import queue
from contextlib import suppress

from vllm.v1.engine.core import EngineCoreProc

POLL_S = 0.002
"""Pause between two looks at restores under way, seconds."""
PIN_POLL_S = 0.1
"""Longest pause, seconds: an operator's pin is read by a step."""


@functools.cache
def wait_when_idle() -> None:
    """Make the core of this process wait as said above; it changes nothing for plain engines."""
    stock = EngineCoreProc._process_input_queue

    @functools.wraps(stock)
    def process_input_queue(self: EngineCoreProc) -> None:
        if not self.is_running() and hasattr(self.scheduler, "leave_lent"):
            self.scheduler.leave_lent()
        limit_s = idle_pause_s(self)
        if limit_s > 0:
            with suppress(queue.Empty):
                self._handle_client_request(*self.input_queue.get(timeout=limit_s))
        stock(self)

    EngineCoreProc._process_input_queue = process_input_queue


def idle_pause_s(core: EngineCoreProc) -> float:
    """How long the core may wait for a request before its next step, seconds."""
    manager = getattr(core.scheduler, "sum_manager", None)
    if manager is None or not manager.has_pending_work or core.scheduler.has_live_requests():
        return 0.0
    # With asynchronous scheduling the queue is never empty while there are steps, idle ones too.
    if any(output.total_num_scheduled_tokens for _, output, _ in core.batch_queue or ()):
        return 0.0
    return float(min(max(manager.idle_pause_s, POLL_S), PIN_POLL_S))
