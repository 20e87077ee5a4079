"""What a replica says about itself in every stage of its life."""

from dataclasses import replace

import pytest
from dps_deployments.hints import from_stats, to_stats
from dps_deployments.probe import ReplicaProbe
from dps_deployments.ray_adapter import ReplicaIdentity

from dps_ray.fleet.permits import ReplicaPermits
from dps_ray.fleet.routing import Hint
from dps_ray.fleet.state import Health, Source
from dps_ray.modes import Mode
from dps_ray.status import EngineStatus

from .statuses import IDLE, RESTORING


def idle() -> bool:
    return False


@pytest.fixture
def stopping() -> list[bool]:
    """A test puts something in when Serve stops the replica."""
    return []


@pytest.fixture
def probe(stopping: list[bool]) -> ReplicaProbe:
    identity = ReplicaIdentity("r1", "llm#model", "node")
    return ReplicaProbe(identity, "1", ReplicaPermits("r1", 0.0), lambda: bool(stopping))


def test_replica_is_starting_until_its_engine_is_up(probe: ReplicaProbe) -> None:
    state = probe.read()
    assert (state.health, state.source, state.mode) == (Health.STARTING, Source.SERVER, None)


def test_engine_that_is_not_elastic_is_a_full_mode_replica_of_which_nothing_else_is_known(
    probe: ReplicaProbe,
) -> None:
    probe.engine_started(lambda: False, None, idle)
    state = probe.read()
    assert (state.health, state.mode) == (Health.READY, Mode.FULL)
    assert state.restoring is None
    assert state.headroom_share is None
    assert state.running is None


def test_elastic_engine_that_has_not_published_yet_has_no_known_mode(probe: ReplicaProbe) -> None:
    probe.engine_started(lambda: False, lambda: None, idle)
    state = probe.read()
    assert (state.health, state.mode) == (Health.READY, None)


def test_state_shows_the_status_page_and_who_it_is(probe: ReplicaProbe) -> None:
    probe.engine_started(lambda: False, lambda: RESTORING, idle)
    state = probe.read()
    assert (state.replica_id, state.deployment, state.node_id) == ("r1", "llm#model", "node")
    assert (state.mode, state.restoring, state.restore_progress) == (Mode.FAST, True, 0.5)
    assert state.source is Source.ENGINE


def test_every_reading_has_a_higher_sequence(probe: ReplicaProbe) -> None:
    readings = [probe.read().sequence]
    probe.engine_started(lambda: False, lambda: IDLE, idle)
    readings += [probe.read().sequence for _ in range(3)]
    assert readings == sorted(set(readings))


def test_page_that_stands_still_grows_old_while_the_engine_owes_answers() -> None:
    now_s, works, page = 100.0, False, IDLE
    identity = ReplicaIdentity("r1", "llm#model", "node")
    permits = ReplicaPermits("r1", 0.0)
    probe = ReplicaProbe(identity, "1", permits, lambda: False, lambda: now_s)
    probe.engine_started(lambda: False, lambda: page, lambda: works)
    ages = []
    for moment in [
        (100.0, False, 1),
        (160.0, False, 1),  # An idle engine has nothing to publish: its page is still true.
        (160.5, True, 1),
        (164.0, True, 1),
        (164.1, True, 2),
        (164.3, True, 2),
        (165.0, False, 2),
    ]:
        now_s, works, sequence = moment
        page = replace(IDLE, sequence=sequence)
        ages.append(probe.read().measured_ago_s)
    assert ages == pytest.approx([0.0, 0.0, 0.5, 4.0, 0.0, 0.2, 0.0])


def test_death_is_latched(probe: ReplicaProbe) -> None:
    dead = True
    probe.engine_started(lambda: dead, lambda: IDLE, idle)
    assert probe.read().health is Health.DEAD
    dead = False
    state = probe.read()
    assert state.health is Health.DEAD
    assert state.fault == probe.cause_of_death


def test_replica_that_serve_stops_says_that_it_is_draining_and_death_still_shows(
    probe: ReplicaProbe, stopping: list[bool]
) -> None:
    probe.engine_started(lambda: False, lambda: IDLE, idle)
    assert probe.read().health is Health.READY
    stopping.append(True)
    state = probe.read()
    assert (state.health, state.mode) == (Health.DRAINING, Mode.FULL)
    probe.latch_death("killed")
    assert probe.read().health is Health.DEAD


def test_status_page_without_a_living_writer_means_death(probe: ReplicaProbe) -> None:
    def read() -> EngineStatus:
        raise RuntimeError("never settles")

    probe.engine_started(lambda: False, read, idle)
    assert probe.read().health is Health.DEAD
    assert probe.cause_of_death == "never settles"


def test_fallback_statistics_carry_mode_restore_and_death(probe: ReplicaProbe) -> None:
    probe.engine_started(lambda: False, lambda: RESTORING, idle)
    assert from_stats(to_stats(probe.read())) == Hint(Mode.FAST, restoring=True, dead=False)
    probe.latch_death("killed")
    hint = from_stats(to_stats(probe.read()))
    assert hint is not None
    assert hint.dead
    assert from_stats({}) is None


def test_fallback_statistics_do_not_move_with_load(probe: ReplicaProbe) -> None:
    statuses = iter([IDLE, EngineStatus(**{**vars(IDLE), "running": 9, "used_blocks": 30})])
    probe.engine_started(lambda: False, lambda: next(statuses), idle)
    assert to_stats(probe.read()) == to_stats(probe.read())
