"""Points in the soak's queues of work, and the error that a soak ends with."""

import threading

FENCE_TIMEOUT_S = 60.0


class SoakError(AssertionError):
    """A broken invariant, in words."""


class Point:
    """A point in a queue of work, which the queue reaches."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self) -> None:
        if not self._event.wait(FENCE_TIMEOUT_S):
            raise SoakError(f"a fence did not open within {FENCE_TIMEOUT_S} s")
