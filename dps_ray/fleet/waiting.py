"""A bounded queue by priority: who goes next, and who is shed when it is full.

Those that wait grow more urgent, one level of priority in every ``ageing_s``. All that wait age
alike, so that their order never changes: what counts is the moment of arrival, shifted by
``ageing_s`` for each level. A request is overtaken only by more urgent ones that arrive within
``ageing_s`` for each level between the two, and then by nobody.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass


def rank_of(priority: int, arrived_s: float, ageing_s: float) -> float:
    """Place in the order of service, lower is sooner; on the clock of ``arrived_s``, seconds.

    Parameters
    ----------
    priority
        Lower is sooner, as in vLLM.
    arrived_s
        When the request arrived, monotonic seconds.
    ageing_s
        Wait that counts as much as one level of priority, seconds.
    """
    return priority * ageing_s + arrived_s


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """One request in the order in which it is served."""

    rank_s: float
    """See ``rank_of``."""
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

    def arrive(self, rank_s: float) -> Ticket:
        """Take in a request, which waits until ``admit`` gives it a place; then call ``shed``.

        Parameters
        ----------
        rank_s
            See ``rank_of``.
        """
        ticket = Ticket(rank_s, self._next_number)
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
