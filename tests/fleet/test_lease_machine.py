"""Restore leases through any history of lost messages, silence and crashes."""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dps_ray.fleet.figures import FleetFigures
from dps_ray.fleet.lease_holder import LeaseHolder
from dps_ray.fleet.leases import LeaseBook, LeaseOptions
from dps_ray.fleet.state import Health, ReplicaState

from .test_leases import TTL_S, Clock, figures, wish


class LeaseMachine(RuleBasedStateMachine):
    """Replicas, a book that may crash, and messages that may be slow or lost.

    Replicas restore only on a valid lease; the book must keep them to its limit whatever happens.
    """

    names = st.sampled_from(["r0", "r1", "r2"])

    @initialize(limit=st.integers(1, 2), per_node=st.integers(1, 2))
    def build(self, limit: int, per_node: int) -> None:
        self.clock = Clock()
        self.terms = LeaseOptions(
            ttl_s=TTL_S, max_concurrent=limit, max_per_node=per_node, alone_after_s=None
        )
        self.book = LeaseBook(self.terms, self.clock)
        self.clock.now_s += TTL_S
        self.holders = {
            f"r{n}": LeaseHolder(f"r{n}", self.terms, self.clock.now_s) for n in range(3)
        }
        self.wants = dict.fromkeys(self.holders, True)
        self.health = dict.fromkeys(self.holders, Health.READY)
        self.sequence = 0
        self.heard: dict[str, int] = {}
        self.sent: list[tuple[float, ReplicaState]] = []

    def node(self, name: str) -> str:
        return f"n{int(name[1]) % 2}"

    @rule(name=names)
    def send(self, name: str) -> None:
        self.clock.now_s += 1e-3
        self.holders[name].reporting(self.wants[name], self.clock.now_s)
        state = wish(
            name,
            self.node(name),
            wants_restore=self.wants[name],
            has_lease=self.holders[name].has_lease(self.clock.now_s),
            health=self.health[name],
        )
        self.sequence += 1
        self.sent.append((self.clock.now_s, state.model_copy(update={"sequence": self.sequence})))

    @rule(data=st.data(), answer_arrives=st.booleans())
    def deliver(self, data: st.DataObject, answer_arrives: bool) -> None:
        """A report arrives, late perhaps; callers give up after two seconds."""
        self.sent = [item for item in self.sent if self.clock.now_s - item[0] <= 2.0]
        if not self.sent:
            return
        sent_at_s, state = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        if state.sequence <= self.heard.get(state.replica_id, 0):
            # The controller's table refuses it, and its answer says so.
            return
        self.heard[state.replica_id] = state.sequence
        granted = self.book.answer(state, self.figures())
        if answer_arrives:
            self.holders[state.replica_id].answered(self.terms, granted is True, sent_at_s)

    @rule(name=names, answer_arrives=st.booleans())
    def report(self, name: str, answer_arrives: bool) -> None:
        """A report that arrives at once."""
        self.send(name)
        sent_at_s, state = self.sent.pop()
        self.heard[name] = state.sequence
        granted = self.book.answer(state, self.figures())
        if answer_arrives:
            self.holders[name].answered(self.terms, granted is True, sent_at_s)
        if self.health[name] is not Health.READY:
            assert granted is not True

    @rule(name=names, answer_arrives=st.booleans())
    def change_mind(self, name: str, answer_arrives: bool) -> None:
        self.wants[name] = not self.wants[name]
        self.report(name, answer_arrives)
        self.wants[name] = not self.wants[name]

    @rule(name=names)
    def drain(self, name: str) -> None:
        self.health[name] = Health.DRAINING

    @rule(seconds=st.sampled_from([0.1, 1.0, TTL_S / 2, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(name=names, hold_s=st.sampled_from([0.0, 1.0, 2 * TTL_S]))
    def revoke(self, name: str, hold_s: float) -> None:
        """An operator takes a lease back; its holder has not heard of it yet."""
        self.book.revoke(name, hold_s)

    @rule()
    def crash(self) -> None:
        self.book = LeaseBook(self.terms, self.clock)
        self.heard.clear()

    @invariant()
    def valid_leases_stay_within_the_limits(self) -> None:
        now_s = self.clock.now_s
        valid = [name for name, holder in self.holders.items() if holder.has_lease(now_s)]
        assert len(valid) <= (self.terms.max_concurrent or 0)
        for node in ("n0", "n1"):
            assert sum(self.node(name) == node for name in valid) <= self.terms.max_per_node

    def figures(self) -> Callable[[], FleetFigures]:
        return lambda: figures(live=3, present=3)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
