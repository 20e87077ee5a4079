"""Hypothesis drives the soak: it looks for short histories that break an invariant."""

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from dps_ray.checks.soak import DWELL_S, RANKS, Soak
from dps_ray.checks.soak_requests import LONGEST_PREFIX, TOPICS
from dps_ray.checks.soak_rules import Rules
from dps_ray.memory.region import Binding
from dps_ray.modes import Pin


class SoakMachine(RuleBasedStateMachine):
    """Every operation of the soak as a rule."""

    parts: Rules | None = None

    @initialize(
        binding=st.sampled_from(["fixed", "any"]), by_layer=st.booleans(), queued_link=st.booleans()
    )
    def build(self, binding: Binding, by_layer: bool, queued_link: bool) -> None:
        self.soak = Soak(0, binding, type(self).parts, by_layer, queued_link)

    @rule(topic=st.integers(0, TOPICS - 1), length=st.integers(0, LONGEST_PREFIX),
          room=st.integers(0, 6))  # fmt: skip
    def serve(self, topic: int, length: int, room: int) -> None:
        self.soak.traffic.serve(topic, length, room)

    @rule(pick=st.integers(0, 7))
    def grow(self, pick: int) -> None:
        self.soak.traffic.grow(pick)

    @rule(spare=st.integers(0, 7))
    def burst(self, spare: int) -> None:
        self.soak.traffic.burst(spare)

    @rule()
    def outgrow(self) -> None:
        self.soak.outgrow()

    @rule(pick=st.integers(0, 7))
    def finish(self, pick: int) -> None:
        self.soak.traffic.finish(pick)

    @rule()
    def finish_all(self) -> None:
        self.soak.traffic.finish_all()

    @rule(pin=st.sampled_from([Pin.AUTO, Pin.AUTO, *Pin]))
    def pin(self, pin: Pin) -> None:
        self.soak.pin(pin)

    @rule(rank=st.integers(0, RANKS - 1))
    def damage(self, rank: int) -> None:
        self.soak.damage(rank)

    @rule(rank=st.integers(0, RANKS - 1))
    def stall(self, rank: int) -> None:
        self.soak.stall(rank)

    @rule()
    def disturb(self) -> None:
        self.soak.disturb()

    @rule(pick=st.integers(0, 7))
    def transfer(self, pick: int) -> None:
        self.soak.traffic.transfer(pick)

    @rule()
    def settle(self) -> None:
        self.soak.settle()

    @rule(steps=st.integers(1, 3))
    def revoke(self, steps: int) -> None:
        self.soak.revoke(steps)

    @rule(pause_s=st.sampled_from([0.0, DWELL_S]), late=st.booleans(), busy=st.booleans())
    def step(self, pause_s: float, late: bool, busy: bool) -> None:
        self.soak.step(pause_s, late, busy)

    @rule(spare=st.integers(0, 7), late=st.booleans(), busy=st.booleans())
    def pass_by(self, spare: int, late: bool, busy: bool) -> None:
        self.soak.pass_by(spare, late, busy)

    def teardown(self) -> None:
        if hasattr(self, "soak"):
            self.soak.close()


def search(histories: int, start: int, rules: Rules | None = None) -> str | None:
    """What ``histories`` random histories broke, or ``None``.

    A race need not repeat when Hypothesis replays it: then the finding is named as it was.
    """
    machine = type("SoakSearch", (SoakMachine,), {"parts": rules})
    options = settings(
        max_examples=histories,
        stateful_step_count=40,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        # A race seldom repeats, so shrinking a history would only take time.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(start)(machine), settings=options)
    except (AssertionError, RuntimeError, ValueError, LookupError, Flaky) as error:
        return f"{type(error).__name__}: {error}"
    return None
