"""What a router tells about its decisions, and how a dry run compares."""

import numpy as np
import pytest

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.policies import LeastPressure, ModeAware, PowerOfTwo
from dps_ray.fleet.routing import Tier
from dps_ray.fleet.tally import DryRun
from dps_ray.fleet.view import FleetView
from dps_ray.modes import Floor, Mode

from .builders import replica_state
from .test_view import CALM, peers, publication


def view_with(*changes: dict[str, object], dry_run: DryRun | None = None) -> FleetView:
    view = FleetView(np.random.default_rng(0))
    states = [replica_state(f"r{n}", **change) for n, change in enumerate(changes)]
    view.offer(peers(*(state.replica_id for state in states)), 0.0)
    view.merge(publication(*states).model_copy(update={"dry_run": dry_run}), 0.0)
    return view


def test_decisions_are_counted_by_first_choice() -> None:
    view = view_with({}, {"running": 50})
    for _ in range(5):
        view.decide(0.1, limit=2)
    report = view.report("me")
    assert (report.decisions, report.picks, report.blind) == (5, {"r0": 5}, 0)
    assert (report.router_id, report.policy, report.version) == ("me", "mode_aware", 1)


def test_decisions_without_a_live_replica_are_told_apart() -> None:
    view = view_with({})
    view.decide(100.0, limit=1)
    view.decide(100.0, Ask(floor=Floor.FULL), limit=1)
    assert view.report("me").blind == 2


def test_decision_that_nobody_can_serve_is_counted() -> None:
    view = view_with({"mode": Mode.FAST})
    view.decide(0.1, Ask(floor=Floor.FULL), limit=1)
    assert view.report("me").unplaced == 1


def test_one_decision_of_every_report_comes_with_its_reasons() -> None:
    view = view_with({}, {"restoring": True})
    view.decide(0.1, Ask(session="s"), limit=2)
    view.decide(0.1, limit=2)
    example = view.report("me").example
    assert example is not None
    assert (example.session, example.order) == (True, ("r0", "r1"))
    assert [reason.tier for reason in example.reasons] == [Tier.READY, Tier.RESTORING]
    assert view.report("me").example is None
    view.decide(0.1, limit=2)
    assert view.report("me").example is not None


def test_dry_run_that_ignores_restores_shows_as_worse_in_the_live_policys_eyes() -> None:
    dry_run = DryRun(policy=LeastPressure(), share=1.0)
    view = view_with({"restoring": True}, {"running": 10}, dry_run=dry_run)
    picks = {view.decide(0.1, limit=1).order[0] for _ in range(10)}
    figures = view.report("me").dry_run
    assert picks == {"r1"}
    assert figures is not None
    assert (figures.policy, figures.compared, figures.agreed) == ("least_pressure", 10, 0)
    assert (figures.worse_tier, figures.better_tier) == (10, 0)
    assert figures.dry_run_regret == pytest.approx(10 * 0.02)


def test_regret_is_the_cost_of_the_other_policys_pick() -> None:
    dry_run = DryRun(policy=LeastPressure(), share=1.0)
    view = view_with({"mode": Mode.FAST}, {"headroom_blocks": 90}, dry_run=dry_run)
    view.decide(0.1, limit=1)
    figures = view.report("me").dry_run
    assert figures is not None
    assert figures.live_regret == pytest.approx(0.25 - 0.1)
    assert figures.dry_run_regret == pytest.approx(0.1)


def test_dry_run_starts_over_with_another_policy_and_ends_with_none() -> None:
    view = view_with({}, {}, dry_run=DryRun(policy=PowerOfTwo(), share=1.0))
    view.decide(0.1, limit=1)
    again = publication(version=2, routing=CALM)
    other = DryRun(policy=ModeAware(), share=1.0)
    view.merge(again.model_copy(update={"dry_run": other}), 0.2)
    figures = view.report("me").dry_run
    assert figures is not None
    assert (figures.policy, figures.compared) == ("mode_aware", 0)
    view.merge(again, 0.3)
    assert view.report("me").dry_run is None
