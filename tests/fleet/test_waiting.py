"""The bounded queue by priority, against a list that is sorted anew for every question."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dps_ray.fleet.waiting import PriorityQueue, Ticket, rank_of


def test_urgent_request_is_served_first_and_equals_in_the_order_of_arrival() -> None:
    queue = PriorityQueue()
    late, first, second, urgent = (queue.arrive(priority) for priority in (5, 0, 0, -1))
    assert queue.admit(2) == [urgent, first]
    queue.leave(urgent)
    assert queue.admit(2) == [second]
    assert queue.before(late) == 0


def test_full_queue_sheds_the_least_urgent_and_the_youngest_among_equals() -> None:
    queue = PriorityQueue()
    old, young = queue.arrive(0), queue.arrive(0)
    assert queue.shed(2) == []
    urgent = queue.arrive(-3)
    assert queue.shed(2) == [young]
    lazy = queue.arrive(1)
    assert queue.shed(2) == [lazy]
    assert queue.admit(None) == [urgent, old]


def test_request_that_left_while_it_waited_holds_no_place() -> None:
    queue = PriorityQueue()
    gone, other = queue.arrive(0), queue.arrive(0)
    queue.leave(gone)
    queue.leave(gone)
    assert queue.admit(1) == [other]
    assert (queue.placed, queue.waiting) == (1, 0)


AGEING_S = 30.0


@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.integers(0, 40), st.integers(0, 2)),
        min_size=2,
        max_size=40,
    )
)
def test_request_is_overtaken_only_by_more_urgent_ones_that_come_soon_after_it(
    arrivals: list[tuple[int, int, int]],
) -> None:
    """However long they keep coming: so no request starves."""
    queue = PriorityQueue()
    told: dict[Ticket, tuple[int, float]] = {}
    waiting: list[Ticket] = []
    now_s = 0.0
    for priority, pause_s, ends in arrivals:
        now_s += pause_s
        ticket = queue.arrive(rank_of(priority, now_s, AGEING_S))
        told[ticket] = priority, now_s
        waiting.append(ticket)
        for served in queue.admit(ends):
            waiting.remove(served)
            mine, served_s = told[served]
            for priority_before, since_s in (told[other] for other in waiting):
                if since_s < served_s:
                    assert served_s - since_s <= AGEING_S * (priority_before - mine)
            queue.leave(served)


def test_request_that_waits_is_served_though_more_urgent_ones_never_cease_to_come() -> None:
    queue = PriorityQueue()
    patient = queue.arrive(rank_of(2, 0.0, AGEING_S))
    for second in range(1, 200):
        queue.arrive(rank_of(0, float(second), AGEING_S))
        (served,) = queue.admit(1)
        queue.leave(served)
        if served == patient:
            break
    assert second == 2 * AGEING_S


class QueueMachine(RuleBasedStateMachine):
    """Arrivals, ends and a number of places that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PriorityQueue()
        self.waiting: list[Ticket] = []
        self.placed: set[Ticket] = set()
        self.places: int | None = 2

    @rule(priority=st.integers(-2, 2), room=st.integers(0, 4))
    def arrive(self, priority: int, room: int) -> None:
        self.waiting.append(self.queue.arrive(priority))
        self.admit(self.places)
        self.waiting.sort()
        shed = self.queue.shed(room)
        assert shed == self.waiting[room:]
        del self.waiting[room:]

    @rule(places=st.none() | st.integers(0, 4))
    def admit(self, places: int | None) -> None:
        self.places = places
        self.waiting.sort()
        free = len(self.waiting) if places is None else max(0, places - len(self.placed))
        admitted = self.queue.admit(places)
        assert admitted == self.waiting[:free]
        self.placed.update(admitted)
        del self.waiting[:free]

    @precondition(lambda self: self.waiting or self.placed)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted([*self.waiting, *self.placed])))
        self.queue.leave(ticket)
        self.placed.discard(ticket)
        self.waiting = [other for other in self.waiting if other != ticket]

    @invariant()
    def counts_agree(self) -> None:
        assert (self.queue.waiting, self.queue.placed) == (len(self.waiting), len(self.placed))


TestQueueMachine = QueueMachine.TestCase
