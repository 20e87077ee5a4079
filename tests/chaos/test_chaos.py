"""The chaos check's own judgement: what was hurt, whose fault an end was, what is a failure."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

import pytest
import yaml
from dps_deployments.validation import validate_file

from dps_ray.chaos import run as chaos_run
from dps_ray.chaos.faults import Fault, Kill, titled
from dps_ray.chaos.fleet import chaos_config
from dps_ray.chaos.load import Ending, Record
from dps_ray.chaos.verdict import Aftermath, judge, share_out
from dps_ray.chaos.watch import Restores, Sight, Watch, sight_of
from dps_ray.report import Report


def test_replica_is_out_of_routing_when_no_router_offers_it_or_it_is_known_dead() -> None:
    def entry(name: str, standing: str) -> dict[str, object]:
        return {"replica_id": name, "standing": standing, "changed_ago_s": 2.0}

    status = {
        "replicas": [
            entry("a", "live"),
            entry("b", "dead"),
            entry("c", "live"),
            entry("d", "cold"),
        ],
        "routers": [{"offered": ["a", "b"]}, {"offered": ["a", "d"]}],
        "listening_routers": 2,
        "time_s": 1_000_040.0,
    }
    # The answer took three seconds.
    sight = sight_of(status, 43.0, 1_000_000.0)
    assert sight.gone_at_s == {"b": 38.0}
    assert sight.serving == {"a"}
    assert sight.routable == {"a", "d"}


@pytest.mark.parametrize(
    ("title", "fault"),
    [
        ("ray::ServeReplica:llm:DpsLLMServer:tiny.handle_request_with_rejection", Fault.REPLICA),
        ("VLLM::EngineCore", Fault.ENGINE),
        ("ray::ServeReplica:dps-controller:FleetController", Fault.CONTROLLER),
        ("ray::ProxyActor", Fault.PROXY),
        ("ray::HAProxyManager", Fault.PROXY),
        ("VLLM::Worker_TP0", None),
        ("ray::ServeReplica:llm:DpsIngress", Fault.INGRESS),
    ],
)
def test_processes_are_known_by_their_titles(title: str, fault: Fault | None) -> None:
    assert [each for each in Fault if titled(each, title)] == ([fault] if fault else [])


def test_rank_that_is_killed_or_stopped_is_not_the_first() -> None:
    assert [f for f in Fault if titled(f, "VLLM::Worker_TP1")] == [Fault.RANK, Fault.HANG]


def record(ended_s: float, ending: Ending = Ending.OK, resent: int = 0) -> Record:
    return Record(
        stream=True, wanted_tokens=1, started_s=0.0, ended_s=ended_s, ending=ending, resent=resent
    )


def judged(fault: Fault, *records: Record, **changes: object) -> list[str]:
    """Names of the checks that fail when this followed a kill at second 10."""
    aftermath = Aftermath(Kill(fault, 1, 10.0), out_of_routing_s=0.2, full_strength_s=5.0)
    restores = Restores(most_at_once=1, most_permitted=1, returns=3)
    left_behind: list[str] = []
    for name, value in changes.items():
        if name == "left_behind":
            left_behind = [str(value)]
        else:
            setattr(restores if hasattr(restores, name) else aftermath, name, value)
    before = share_out([record(1.0), *records], [aftermath])
    report = Report("check chaos")
    judge(
        report,
        [aftermath],
        before,
        restores,
        left_behind=left_behind,
        lease_limit=1,
        hung_after_s=10.0,
    )
    return [name for name, passed in report.checks.items() if not passed]


def test_requests_answered_by_others_and_streams_that_end_with_an_error_are_no_failure() -> None:
    assert judged(Fault.ENGINE, record(11.0), record(12.0, Ending.ERROR)) == []


def test_kill_that_no_open_request_met_is_a_failure() -> None:
    between = record(11.0)
    between.started_s = 10.5
    for records in ((), (between,)):
        assert judged(Fault.CONTROLLER, *records) == ["controller: a request was open at the kill"]


@pytest.mark.parametrize("ending", [Ending.LOST, Ending.HUNG, Ending.CUT, Ending.WRONG])
def test_requests_that_were_let_down_are_a_failure(ending: Ending) -> None:
    assert len(judged(Fault.REPLICA, record(11.0, ending))) == 1


def test_only_a_dead_ingress_may_lose_requests_that_lie_open_in_it() -> None:
    assert judged(Fault.INGRESS, record(11.0, Ending.LOST), record(12.0, Ending.CUT)) == []
    assert judged(Fault.INGRESS, record(11.0, Ending.HUNG)) == ["ingress: no request hung"]


def test_only_a_dead_proxy_may_break_connections() -> None:
    assert judged(Fault.PROXY, record(11.0, resent=2), record(12.0, Ending.CUT)) == []
    assert judged(Fault.RANK, record(11.0, resent=2)) == ["rank: no connection broke"]


def test_a_dead_controller_costs_nothing_at_all() -> None:
    assert judged(Fault.CONTROLLER, record(11.0, Ending.ERROR)) == [
        "controller: every request was answered"
    ]


def test_rank_that_hangs_leaves_routing_once_it_has_been_silent_for_long_enough() -> None:
    assert judged(Fault.HANG, record(11.0), out_of_routing_s=15.5) == []
    assert judged(Fault.HANG, record(11.0), out_of_routing_s=16.5) == [
        "hang: out of routing within 16 s"
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"out_of_routing_s": 1.5},
        {"out_of_routing_s": None},
        {"returned": True},
        {"full_strength_s": None},
        {"most_permitted": 2},
        {"most_at_once": 2},
        {"returns": 0},
        {"left_behind": "VLLM::EngineCore"},
    ],
)
def test_each_promise_of_the_fleet_is_checked(change: dict[str, object]) -> None:
    assert len(judged(Fault.REPLICA, record(11.0), **change)) == 1


def test_failure_before_the_first_kill_is_not_blamed_on_it() -> None:
    assert judged(Fault.ENGINE, record(5.0, Ending.LOST), record(11.0)) == [
        "before the first kill every request was answered"
    ]


def test_fleet_that_is_hurt_passes_the_check_of_configurations(tmp_path: Path) -> None:
    file = tmp_path / "chaos.yaml"
    for replicas in (1, 8):
        placed = chaos_config(replicas, ranks=2).placed(port=8000, model_source=str(tmp_path))
        file.write_text(yaml.safe_dump(placed.content))
        assert validate_file(file) == []


@pytest.mark.parametrize("comes_back", [False, True])
def test_dead_replica_that_returns_to_routing_is_seen(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    def sight(*replicas: str) -> Sight:
        return Sight(
            float("inf"), frozenset(replicas), frozenset(replicas), listening=1, gone_at_s={}
        )

    before = sight("victim", "other")
    again = before if comes_back else sight("other")
    seen = [before, sight("other"), sight("other"), again, sight("new", "other")]

    class Looks:
        @property
        def sight(self) -> Sight:
            return seen.pop(0) if len(seen) > 1 else seen[0]

    monkeypatch.setattr(
        chaos_run, "kill_one", lambda *_: Kill(Fault.REPLICA, 1, chaos_run.time.monotonic())
    )
    monkeypatch.setattr(chaos_run, "POLL_S", 0.0)
    target = chaos_run.Target("", "", 2, processes=lambda: ())
    after = asyncio.run(
        chaos_run._hurt(target, Fault.REPLICA, cast(Watch, Looks()), Counter(), random.Random(0))
    )
    assert after.gone == {"victim"}
    assert after.returned is comes_back


def test_kill_waits_for_a_look_at_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status call had failed just then; without a look, leaving routing could not be seen."""

    def sight(at_s: float, *replicas: str) -> Sight:
        return Sight(at_s, frozenset(replicas), frozenset(replicas), listening=1, gone_at_s={})

    class Looks:
        """Fails at first, then shows the killed replica leave."""

        def __init__(self) -> None:
            self.asked = 0

        @property
        def sight(self) -> Sight | None:
            self.asked += 1
            if self.asked == 1:
                return None
            return sight(9.0, "victim", "other")

    looks = Looks()

    def kill(fault: Fault, processes: Callable[[], Collection[int]], rng: random.Random) -> Kill:
        assert looks.asked > 1
        monkeypatch.setattr(Looks, "sight", sight(float("inf"), "new", "other"))
        return Kill(fault, 1, chaos_run.time.monotonic())

    monkeypatch.setattr(chaos_run, "kill_one", kill)
    target = chaos_run.Target("", "", 2, processes=lambda: ())
    after = asyncio.run(
        chaos_run._hurt(target, Fault.ENGINE, cast(Watch, looks), Counter(), random.Random(0))
    )
    assert after.out_of_routing_s is not None
    assert after.full_strength_s is not None
