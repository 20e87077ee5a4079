"""The precision budget: how many replicas could be in fast mode, at any moment."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dps_ray.fleet.budget import BudgetOptions, PrecisionBudget
from dps_ray.fleet.state import Health
from dps_ray.modes import Mode

from .builders import replica_state
from .test_leases import Clock

SETTLE_S = 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def settled(clock: Clock, **options: Any) -> PrecisionBudget:
    budget = PrecisionBudget(BudgetOptions(**options), clock, SETTLE_S)
    clock.now_s += SETTLE_S
    return budget


def ask(budget: PrecisionBudget, replica_id: str, live: int = 4, **changes: Any) -> bool:
    return budget.answer(replica_state(replica_id, **{"may_go_fast": False, **changes}), live)


def test_without_a_limit_everybody_may_go_fast(clock: Clock) -> None:
    budget = settled(clock)
    assert all(ask(budget, str(number)) for number in range(9))


def test_share_of_the_live_replicas_gets_allowances(clock: Clock) -> None:
    budget = settled(clock, max_fast_replica_share=0.5)
    assert [ask(budget, name) for name in "abcd"] == [True, True, False, False]
    assert ask(budget, "c", live=6) is True


@pytest.mark.parametrize(
    ("live", "share", "expected"),
    [
        (1, 0.5, 1),
        (2, 0.25, 1),
        (2, 0.9, 1),
        (3, 0.5, 1),
        (4, 0.5, 2),
        (100, 0.29, 29),
        (2, 1.0, 2),
        (8, 0.0, 0),
    ],
)
def test_share_is_rounded_down_but_a_small_fleet_may_go_fast_too(
    clock: Clock, live: int, share: float, expected: int
) -> None:
    budget = settled(clock, max_fast_replica_share=share)
    assert sum(ask(budget, str(number), live=live) for number in range(live)) == expected


def test_allowance_moves_to_a_clearly_busier_replica_once_its_end_is_confirmed(
    clock: Clock,
) -> None:
    budget = settled(clock, max_fast_replica_share=0.5)
    assert ask(budget, "idle", live=2, used_blocks=2) is True
    busy = {"live": 2, "used_blocks": 38, "free_blocks": 2}
    assert ask(budget, "busy", **busy) is False
    assert ask(budget, "idle", live=2, may_go_fast=True, used_blocks=2) is False
    assert ask(budget, "busy", **busy) is False
    assert ask(budget, "idle", live=2, may_go_fast=False, used_blocks=2) is False
    assert ask(budget, "busy", **busy) is True


def test_allowance_that_was_withdrawn_for_a_busy_replica_goes_to_no_other(clock: Clock) -> None:
    budget = settled(clock, max_fast_replica_share=0.25)
    assert ask(budget, "idle", used_blocks=2) is True
    assert ask(budget, "busy", used_blocks=38, free_blocks=2) is False
    assert ask(budget, "idle", may_go_fast=False, used_blocks=2) is False
    assert ask(budget, "bystander", used_blocks=2) is False
    assert ask(budget, "busy", used_blocks=38, free_blocks=2) is True


def test_allowance_is_not_kept_for_ever_for_a_replica_that_has_gone_silent(clock: Clock) -> None:
    budget = settled(clock, max_fast_replica_share=0.25)
    assert ask(budget, "idle", used_blocks=2) is True
    assert ask(budget, "busy", used_blocks=38, free_blocks=2) is False
    assert ask(budget, "idle", may_go_fast=False, used_blocks=2) is False
    clock.now_s += SETTLE_S
    assert ask(budget, "bystander", used_blocks=2) is True


def test_replica_in_fast_mode_keeps_its_allowance_however_idle(clock: Clock) -> None:
    budget = settled(clock, max_fast_replica_share=0.5)
    assert ask(budget, "fast", live=2, mode=Mode.FAST, may_go_fast=True) is True
    busy = {"live": 2, "used_blocks": 39, "free_blocks": 1}
    assert ask(budget, "busy", **busy) is False
    assert ask(budget, "fast", live=2, mode=Mode.FAST, may_go_fast=True) is True
    assert ask(budget, "busy", **busy) is False


def test_new_budget_gives_nothing_before_it_has_heard_who_could_be_fast(clock: Clock) -> None:
    budget = PrecisionBudget(BudgetOptions(max_fast_replica_share=0.5), clock, SETTLE_S)
    assert ask(budget, "a") is False
    assert ask(budget, "holder", may_go_fast=True) is True
    clock.now_s += SETTLE_S
    assert [ask(budget, "a"), ask(budget, "b")] == [True, False]


def test_dead_replica_makes_room(clock: Clock) -> None:
    budget = settled(clock, max_fast_replica_share=0.5)
    assert ask(budget, "a", live=2, mode=Mode.FAST) is True
    assert ask(budget, "b", live=2) is False
    ask(budget, "a", live=2, health=Health.DEAD)
    assert ask(budget, "b", live=2) is True


def test_too_many_fast_tokens_keep_replicas_in_full_mode_until_the_window_has_passed(
    clock: Clock,
) -> None:
    budget = settled(clock, max_fast_token_share=0.3, window_s=60.0)
    ask(budget, "a", tokens_full=0, tokens_fast=0)
    assert ask(budget, "a", may_go_fast=True, tokens_full=700, tokens_fast=200) is True
    assert ask(budget, "a", may_go_fast=True, tokens_full=700, tokens_fast=400) is False
    assert budget.fast_token_share == pytest.approx(400 / 1100)
    assert ask(budget, "b", mode=Mode.FAST, may_go_fast=True) is True
    clock.now_s += 61.0
    ask(budget, "a", tokens_full=800, tokens_fast=400)
    assert ask(budget, "a", tokens_full=800, tokens_fast=400) is True


class BudgetMachine(RuleBasedStateMachine):
    """Replicas that go fast whenever they may and like, and answers that may get lost."""

    names = st.sampled_from(["r0", "r1", "r2", "r3"])

    @initialize(share=st.sampled_from([0.25, 0.5, 0.75]))
    def build(self, share: float) -> None:
        self.clock = Clock()
        self.options = BudgetOptions(max_fast_replica_share=share)
        self.slots = int(share * 4)
        self.budget = PrecisionBudget(self.options, self.clock, SETTLE_S)
        self.clock.now_s += SETTLE_S
        self.may = dict.fromkeys(["r0", "r1", "r2", "r3"], False)
        self.mode = dict.fromkeys(self.may, Mode.FULL)

    @rule(name=names, used=st.integers(0, 40), answer_arrives=st.booleans())
    def report(self, name: str, used: int, answer_arrives: bool) -> None:
        answer = ask(
            self.budget,
            name,
            mode=self.mode[name],
            may_go_fast=self.may[name],
            used_blocks=used,
            free_blocks=40 - used,
        )
        if answer_arrives:
            self.may[name] = answer

    @rule(name=names)
    def switch(self, name: str) -> None:
        if self.mode[name] is Mode.FAST:
            self.mode[name] = Mode.FULL
        elif self.may[name]:
            self.mode[name] = Mode.FAST

    @rule()
    def crash(self) -> None:
        """Every replica reports to the new controller within its first seconds."""
        self.budget = PrecisionBudget(self.options, self.clock, SETTLE_S)
        for name in self.may:
            self.report(name, 0, True)
        self.clock.now_s += SETTLE_S

    @invariant()
    def those_that_could_be_fast_stay_within_the_budget(self) -> None:
        could = [n for n in self.may if self.may[n] or self.mode[n] is Mode.FAST]
        assert len(could) <= self.slots


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
