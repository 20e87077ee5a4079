"""Streams and events that run as late as they can.

Work given to a stream runs only when something waits for it, and then no more of it than is
needed: whatever is not ordered by events or synchronisation happens in the order that hurts most.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Record:
    """One recording of an event."""

    stream: int
    reached: bool = False

    def reach(self) -> None:
        self.reached = True


@dataclass
class Operation:
    """One entry of a stream's queue."""

    name: str
    run: Callable[[], object]
    waits_for: Record | None = None


class FakeStreams:
    """Queues of operations by stream handle."""

    def __init__(self) -> None:
        self.order: list[str] = []
        """Names of the operations in the order they ran."""
        self._queues: dict[int, deque[Operation]] = {}
        self._latest: dict[int, Record] = {}
        """The latest record of each event: a wait captures the one of its time."""

    def create(self, stream: int) -> None:
        """Begin an empty queue."""
        self._queues[stream] = deque()

    def enqueue(self, stream: int, name: str, run: Callable[[], object]) -> None:
        """Give ``stream`` something to run after all it has."""
        self._queues[stream].append(Operation(name, run))

    def record(self, stream: int, event: int) -> None:
        """Let ``event`` stand for the point after all that ``stream`` has."""
        made = self._latest[event] = Record(stream)
        self.enqueue(stream, "record", made.reach)

    def wait(self, stream: int, event: int) -> None:
        """Hold back what ``stream`` is given later until the event's latest record is reached."""
        self._queues[stream].append(Operation("wait", lambda: None, self._latest[event]))

    def reach(self, event: int) -> None:
        """Run what must run for the event's latest record, and nothing else."""
        record = self._latest[event]
        while not record.reached:
            self._advance(record.stream)

    def drain(self, stream: int) -> None:
        """Run all work of a stream, and of others only what it waits for."""
        while self._queues[stream]:
            self._advance(stream)

    def drain_all(self) -> None:
        """Run everything."""
        for stream in self._queues:
            self.drain(stream)

    def _advance(self, stream: int) -> None:
        operation = self._queues[stream][0]
        awaited = operation.waits_for
        while awaited is not None and not awaited.reached:
            self._advance(awaited.stream)
        self._queues[stream].popleft()
        self.order.append(operation.name)
        operation.run()
