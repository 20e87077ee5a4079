"""Which way a call takes: the direct one while it works, the handle's while it does not."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dps_ray.fleet.backoff import Backoff
from dps_ray.fleet.ways import Access, Ways

FIRST_S, LONGEST_S = 2.0, 60.0


def access(number: int = 0) -> Access:
    return Access(f"http://192.0.2.1:{number}", f"secret-{number}")


class Caller:
    """A caller's ways, and the clock they go by."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ways = Ways(lambda: self.now_s, Backoff(FIRST_S, LONGEST_S, lambda: 1.0))


def test_secret_is_not_shown() -> None:
    assert "secret" not in repr(access())


def test_restarted_controller_is_asked_for_its_new_access_at_once() -> None:
    ways = Caller().ways
    assert ways.should_ask
    ways.told(access(1))
    ways.reached()
    assert not ways.lost(access(1))
    assert ways.should_ask
    ways.told(access(2))
    assert ways.access == access(2)


def test_port_that_never_answered_is_left_alone_for_longer_and_longer() -> None:
    caller = Caller()
    pauses = []
    for number in range(7):
        caller.ways.told(access())
        # A caller whose own loop stood still misses once, and blames nobody.
        assert caller.ways.lost(access()) == (number > 0)
        closed_s = caller.now_s
        while not caller.ways.should_ask:
            caller.now_s += 1.0
        pauses.append(caller.now_s - closed_s)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    caller.ways.told(access())
    caller.ways.reached()
    caller.ways.lost(access())
    caller.ways.told(None)
    caller.now_s += FIRST_S
    assert caller.ways.should_ask


def test_slow_controller_is_not_asked_again_and_a_silent_port_is_left() -> None:
    ways = Caller().ways
    ways.told(access())
    ways.reached()
    for _ in range(2):
        ways.unanswered()
        assert ways.access == access()
    ways.reached()
    for _ in range(3):
        assert ways.access == access()
        ways.unanswered()
    # Another controller may have taken the place of one that is silent for so long.
    assert ways.should_ask
    ways.told(access(1))
    assert not ways.lost(access())
    assert ways.access == access(1)
    ways.reached()
    ways.lost(access(1))
    ways.told(access())
    ways.unanswered()
    assert ways.access is None
    assert not ways.should_ask


class WaysMachine(RuleBasedStateMachine):
    """Whatever happens, a caller comes back to the direct way within the longest pause."""

    def __init__(self) -> None:
        super().__init__()
        self.caller = Caller()
        self.asked_s = 0.0

    @rule(offered=st.booleans())
    def ask(self, offered: bool) -> None:
        if self.caller.ways.should_ask:
            self.asked_s = self.caller.now_s
            self.caller.ways.told(access() if offered else None)

    @rule(outcome=st.sampled_from(["reached", "lost", "unanswered"]))
    def call(self, outcome: str) -> None:
        if self.caller.ways.access is not None:
            self.asked_s = self.caller.now_s
            if outcome == "lost":
                self.caller.ways.lost(access())
            else:
                getattr(self.caller.ways, outcome)()

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.caller.now_s += seconds

    @invariant()
    def has_a_way_back(self) -> None:
        ways = self.caller.ways
        assert not (ways.should_ask and ways.access is not None)
        if ways.access is None and self.caller.now_s - self.asked_s >= LONGEST_S:
            assert ways.should_ask


WaysMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestWays = WaysMachine.TestCase
