"""A bounded queue by priority: who goes next, and who is shed when it is full."""

from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """One request in the order in which it is served."""

    priority: int
    """Lower is sooner, as in vLLM."""
    number: int
    """In the order of arrival."""


class PriorityQueue:
    """Requests that wait for one of so many places.

    A full queue sheds whoever would be served last, be it the one that arrives: an urgent request
    is taken in while less urgent ones are turned away.
    """

    def __init__(self) -> None:
        self._next_number = 0
        self._placed: set[Ticket] = set()
        self._waiting: list[Ticket] = []

    @property
    def placed(self) -> int:
        """Requests that have a place."""
        return len(self._placed)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def arrive(self, priority: int) -> Ticket:
        """Take in a request, which waits until ``admit`` gives it a place; then call ``shed``."""
        ticket = Ticket(priority, self._next_number)
        self._next_number += 1
        insort(self._waiting, ticket)
        return ticket

    def admit(self, places: int | None) -> list[Ticket]:
        """Give free places to those who are next; ``None`` places: to everybody."""
        free = len(self._waiting) if places is None else max(0, places - len(self._placed))
        admitted, self._waiting = self._waiting[:free], self._waiting[free:]
        self._placed.update(admitted)
        return admitted

    def shed(self, max_waiting: int) -> list[Ticket]:
        """Take those off the queue that are more than may wait."""
        shed, self._waiting = self._waiting[max_waiting:], self._waiting[:max_waiting]
        return shed

    def before(self, ticket: Ticket) -> int:
        """How many of those that wait are served before a ticket."""
        return bisect_left(self._waiting, ticket)

    def leave(self, ticket: Ticket) -> None:
        """Forget a request that has ended, wherever it was."""
        if ticket in self._placed:
            self._placed.remove(ticket)
            return
        index = bisect_left(self._waiting, ticket)
        if self._waiting[index : index + 1] == [ticket]:
            del self._waiting[index]
