"""Reports in, snapshots out."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dps_ray.config import DpsConfigError
from dps_ray.fleet.aggregate import AggregateOptions, FleetAggregate
from dps_ray.fleet.publication import parse_controller_options
from dps_ray.fleet.reporting import ReportOptions, ReportSchedule
from dps_ray.fleet.snapshot import Entry, Standing
from dps_ray.fleet.state import Health
from dps_ray.fleet.table import Verdict

from .builders import replica_state


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> FleetAggregate:
    return FleetAggregate(AggregateOptions(), clock)


def standing(fleet: FleetAggregate, replica_id: str = "a") -> Standing:
    (entry,) = [e for e in fleet.snapshot().entries if e.replica_id == replica_id]
    return entry.standing


def test_late_and_repeated_reports_change_nothing(fleet: FleetAggregate) -> None:
    assert fleet.apply(replica_state(sequence=5, running=5)) is Verdict.TRANSITION
    before = fleet.snapshot()
    assert fleet.apply(replica_state(sequence=5, running=1)) is Verdict.OUTDATED
    assert fleet.apply(replica_state(sequence=4, restoring=True)) is Verdict.OUTDATED
    assert fleet.snapshot() == before


def test_transition_makes_a_version_at_once(fleet: FleetAggregate) -> None:
    fleet.apply(replica_state(sequence=1))
    version = fleet.version
    assert fleet.apply(replica_state(sequence=2, restoring=True)) is Verdict.TRANSITION
    assert fleet.version == version + 1


def test_refreshes_are_collected_into_one_version_per_period(
    fleet: FleetAggregate, clock: Clock
) -> None:
    fleet.apply(replica_state(sequence=1))
    version = fleet.version
    for sequence in range(2, 50):
        clock.now_s += 0.001
        assert fleet.apply(replica_state(sequence=sequence)) is Verdict.REFRESH
        fleet.tick()
    assert fleet.version == version
    clock.now_s += fleet.options.publish_period_s
    fleet.tick()
    fleet.tick()
    assert fleet.version == version + 1


def test_silent_replica_grows_stale_and_is_then_forgotten(
    fleet: FleetAggregate, clock: Clock
) -> None:
    fleet.apply(replica_state())
    assert standing(fleet) is Standing.LIVE
    clock.now_s += fleet.options.stale_after_s + 0.1
    assert standing(fleet) is Standing.STALE
    version = fleet.version
    clock.now_s += fleet.options.forget_after_s
    fleet.tick()
    assert fleet.snapshot().entries == ()
    assert fleet.version == version + 1


def test_replica_that_reports_old_figures_grows_stale_and_is_not_forgotten(
    fleet: FleetAggregate, clock: Clock
) -> None:
    """Its process lives and its engine's page stands still."""
    reports = int(2 * fleet.options.forget_after_s)
    for number in range(reports):
        fleet.apply(replica_state(sequence=number, measured_ago_s=float(number)))
        fleet.tick()
        (entry,) = fleet.snapshot().entries
        assert entry.age_s == number
        old = number > fleet.options.stale_after_s
        assert entry.standing is (Standing.STALE if old else Standing.LIVE)
        clock.now_s += 1.0
    assert fleet.verdicts[Verdict.TRANSITION] == 1
    fleet.apply(replica_state(sequence=reports))
    assert standing(fleet) is Standing.LIVE


def test_death_is_final_and_outlasts_silence(fleet: FleetAggregate, clock: Clock) -> None:
    fleet.apply(replica_state(sequence=1, health=Health.DEAD))
    assert fleet.apply(replica_state(sequence=2)) is Verdict.AFTER_DEATH
    clock.now_s += fleet.options.stale_after_s + 1
    assert standing(fleet) is Standing.DEAD


def test_lost_connection_counts_as_death_until_the_next_report(
    fleet: FleetAggregate, clock: Clock
) -> None:
    fleet.apply(replica_state(sequence=1))
    version = fleet.version
    fleet.lose("a")
    assert standing(fleet) is Standing.DEAD
    (told,) = fleet.changes_since(version).entries
    assert told.lost_ago_s == told.changed_ago_s == 0.0
    fleet.lose("a")
    fleet.lose("never heard")
    assert fleet.version == version + 1
    assert fleet.apply(replica_state(sequence=1)) is Verdict.OUTDATED
    assert standing(fleet) is Standing.DEAD
    assert fleet.apply(replica_state(sequence=2)) is Verdict.TRANSITION
    assert standing(fleet) is Standing.LIVE
    fleet.lose("a")
    clock.now_s += fleet.options.stale_after_s
    assert standing(fleet) is Standing.DEAD
    clock.now_s += 0.1
    assert standing(fleet) is Standing.STALE


def test_entry_tells_how_long_ago_its_latest_transition_was_heard(
    fleet: FleetAggregate, clock: Clock
) -> None:
    fleet.apply(replica_state(sequence=1))
    clock.now_s += 2.0
    fleet.apply(replica_state(sequence=2, running=5))
    assert fleet.snapshot().entries[0].changed_ago_s == 2.0
    fleet.apply(replica_state(sequence=3, restoring=True))
    clock.now_s += 1.0
    assert fleet.snapshot().entries[0].changed_ago_s == 1.0


@pytest.mark.parametrize(
    ("health", "expected"),
    [(Health.STARTING, Standing.COLD), (Health.DRAINING, Standing.DRAINING)],
)
def test_starting_and_draining_are_explicit(
    fleet: FleetAggregate, health: Health, expected: Standing
) -> None:
    fleet.apply(replica_state(health=health))
    assert standing(fleet) is expected


def test_reconfiguring_makes_a_version(fleet: FleetAggregate) -> None:
    version = fleet.version
    fleet.reconfigure(AggregateOptions(stale_after_s=9.0))
    assert fleet.version == version + 1
    assert fleet.options.stale_after_s == 9.0


@pytest.mark.parametrize(
    ("user_config", "message"),
    [
        ({"routing": {"name": "mode_aware", "fast_wieght": 1}}, "fast_wieght is not an option"),
        ({"routing": {"name": "fastest"}}, "user_config.routing"),
        ({"ageing": {"stale_after_s": 90}}, "forget_after_s"),
        (["routing"], "give a mapping"),
    ],
)
def test_wrong_user_config_is_named_in_one_line(user_config: object, message: str) -> None:
    with pytest.raises(DpsConfigError, match=message) as raised:
        parse_controller_options(user_config)
    assert "\n" not in str(raised.value)


def test_report_is_due_on_a_transition_and_at_the_heartbeat_only() -> None:
    schedule = ReportSchedule(ReportOptions(poll_period_s=0.05, heartbeat_s=1.0))
    assert schedule.is_due(replica_state(), 0.0)
    schedule.delivered(replica_state(), 0.0)
    assert not schedule.is_due(replica_state(sequence=2, running=7), 0.9)
    assert schedule.is_due(replica_state(sequence=2, restoring=True), 0.1)
    assert schedule.is_due(replica_state(sequence=2), 1.0)


def test_undelivered_transition_stays_due() -> None:
    schedule = ReportSchedule(ReportOptions())
    schedule.delivered(replica_state(), 0.0)
    changed = replica_state(restoring=True)
    assert schedule.is_due(changed, 0.1)
    assert schedule.is_due(changed, 0.2)


def test_reader_gets_only_what_was_heard_since_its_version(
    fleet: FleetAggregate, clock: Clock
) -> None:
    fleet.apply(replica_state("a"))
    fleet.apply(replica_state("b"))
    seen = fleet.version
    clock.now_s += 1.0
    fleet.apply(replica_state("b", sequence=2, running=3))
    fleet.tick()
    changes = fleet.changes_since(seen)
    assert (changes.version, [entry.replica_id for entry in changes.entries]) == (seen + 1, ["b"])
    assert fleet.changes_since(fleet.version).entries == ()


@pytest.mark.parametrize("version", [None, 3, 10**15])
def test_reader_of_another_controllers_version_gets_everything(
    version: int | None, clock: Clock
) -> None:
    fleet = FleetAggregate(AggregateOptions(), clock, first_version=1000)
    fleet.apply(replica_state("a"))
    fleet.apply(replica_state("b"))
    assert len(fleet.changes_since(version).entries) == 2


class FleetMachine(RuleBasedStateMachine):
    """Any order of reports and any passing of time, against a plain model of the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.fleet = FleetAggregate(AggregateOptions(), self.clock)
        self.latest: dict[str, tuple[int, bool, float]] = {}
        self.lost: dict[str, float] = {}
        self.last_version = self.fleet.version
        self.read_version: int | None = None
        self.read: dict[str, Entry] = {}

    @rule(
        replica_id=st.sampled_from("abc"),
        sequence=st.integers(0, 12),
        dead=st.booleans(),
        restoring=st.booleans(),
    )
    def report(self, replica_id: str, sequence: int, dead: bool, restoring: bool) -> None:
        health = Health.DEAD if dead else Health.READY
        state = replica_state(replica_id, sequence, health=health, restoring=restoring)
        accepted = self.fleet.apply(state).accepted
        known = self.latest.get(replica_id)
        expected = known is None or (sequence > known[0] and (dead or not known[1]))
        assert accepted == expected
        if accepted:
            self.latest[replica_id] = (sequence, dead, self.clock.now_s)
            self.lost.pop(replica_id, None)

    @rule(replica_id=st.sampled_from("abc"))
    def lose(self, replica_id: str) -> None:
        self.fleet.lose(replica_id)
        _, dead, _ = self.latest.get(replica_id, (0, True, 0.0))
        if not dead:
            self.lost.setdefault(replica_id, self.clock.now_s)

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.fleet.tick()
        limit_s = self.fleet.options.forget_after_s
        for replica_id, (_, _, at_s) in list(self.latest.items()):
            if self.clock.now_s - at_s > limit_s:
                del self.latest[replica_id]
                self.lost.pop(replica_id, None)

    @invariant()
    def snapshot_tells_the_latest_accepted_reports(self) -> None:
        entries = {entry.replica_id: entry for entry in self.fleet.snapshot().entries}
        assert set(entries) == set(self.latest)
        for replica_id, (sequence, dead, at_s) in self.latest.items():
            entry = entries[replica_id]
            assert entry.state is not None
            assert entry.state.sequence == sequence
            assert entry.age_s == pytest.approx(self.clock.now_s - at_s)
            lost_s = self.clock.now_s - self.lost.get(replica_id, -1e9)
            lost = lost_s <= self.fleet.options.stale_after_s
            assert entry.lost_ago_s == (lost_s if lost else None)
            assert (entry.standing is Standing.DEAD) == (dead or lost)

    @rule()
    def read_changes(self) -> None:
        """A reader that keeps what it got and forgets what the fleet forgets misses nothing that
        was published."""
        changes = self.fleet.changes_since(self.read_version)
        self.read_version = changes.version
        self.read.update({entry.replica_id: entry for entry in changes.entries})
        for entry in self.fleet.snapshot().entries:
            held = self.read[entry.replica_id]
            assert held.state is not None
            assert entry.state is not None
            # Figures may wait for their period; a transition never does.
            assert held.lost_ago_s is not None or entry.lost_ago_s is None
            assert held.state.restoring == entry.state.restoring
            assert held.state.health is entry.state.health

    @invariant()
    def versions_never_go_back(self) -> None:
        assert self.fleet.version >= self.last_version
        self.last_version = self.fleet.version


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
