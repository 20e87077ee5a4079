"""What is said about a fleet that scaled through a burst."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from dps_deployments.validation import validate_file

from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.burst.fleet import MAX_REPLICAS, OPTIONS, burst_config
from dps_ray.burst.load import BurstLoad
from dps_ray.burst.verdict import broken_promises, judge
from dps_ray.burst.watch import Look, look_of
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.report import Report

SEEN_AFTER_S = 3.0
ANSWERED = RequestRecord(0, 50.0, 50.0, 8, Outcome.OK, chunk_times_s=[51.0], end_s=52.0)
GOOD = [(0, 1, 1), (20, 1, 3), (60, 3, 3), (110, 3, 2), (112, 2, 2), (140, 2, 1), (142, 1, 1)]
"""Seconds, replicas running, replicas wanted."""


def state(name: str, **changes: Any) -> ReplicaState:
    return ReplicaState(
        replica_id=name,
        sequence=1,
        sent_at_s=0.0,
        source=Source.ENGINE,
        code_version="test",
        health=Health.READY,
        **{"restoring": False, "full_requests": 0, **changes},
    )


def look(time_s: float, running: int = 1, target: int = 1, **known: Any) -> Look:
    values = {"stopping": 0, "states": {}, "leaving": frozenset(), **known}
    return Look(time_s=float(time_s), running=running, target=target, **values)


def judged(
    sizes: Sequence[tuple[float, int, int]] = GOOD, *, last: dict[str, Any] | None = None
) -> list[str]:
    """Names of the checks that fail."""
    looks = [look(*size) for size in sizes]
    looks[-1] = replace(looks[-1], **(last or {}))
    report = Report("test")
    judge(report, looks, [ANSWERED], OPTIONS, minimum=1, seen_after_s=SEEN_AFTER_S)
    return [name for name, held in report.checks.items() if not held]


def test_fleet_that_follows_the_burst_passes() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("sizes", "failing"),
    [
        ([(0, 1, 1), (60, 1, 3), (80, 3, 3), *GOOD[3:]], "the fleet grew during the burst"),
        ([(0, 1, 1), (20, 1, 3), (60, 2, 3), *GOOD[4:]], "every replica that was asked for came"),
        (GOOD[:5], "the fleet is back at 1"),
        (
            [*GOOD[:5], (135, 2, 3), *GOOD[5:]],
            "one burst, one turn: no step up after a step down",
        ),
        (
            [*GOOD[:4], (120, 2, 1), (142, 1, 1)],
            "no step down within calm_s of another step",
        ),
        ([*GOOD[:3], (110, 3, 1), (142, 1, 1)], "every step was bounded"),
    ],
)
def test_each_promise_about_the_size_is_checked(
    sizes: list[tuple[float, int, int]], failing: str
) -> None:
    assert failing in judged(sizes)


def test_fleet_whose_last_replica_is_still_stopping_is_not_back() -> None:
    assert judged(last={"stopping": 1}) == ["the fleet is back at 1"]


def test_failed_request_is_not_answered() -> None:
    report = Report("test")
    failed = replace(ANSWERED, outcome=Outcome.FAILED)
    looks = [look(*size) for size in GOOD]
    judge(report, looks, [failed], OPTIONS, minimum=1, seen_after_s=SEEN_AFTER_S)
    assert report.checks["all requests answered"] is False


@pytest.mark.parametrize("busy", [{"restoring": True}, {"full_requests": 2}])
def test_replica_that_long_had_to_stay_must_not_leave(busy: dict[str, Any]) -> None:
    free, held = {"a": state("a")}, {"a": state("a", **busy)}
    gone = frozenset({"a"})
    short = [look(0, states=free), look(1, states=held), look(2, leaving=gone)]
    long = [look(0, states=free), *(look(t, states=held) for t in (1, 2, 3)), look(4, leaving=gone)]
    assert broken_promises(short, SEEN_AFTER_S) == []
    assert broken_promises(long, SEEN_AFTER_S) == ["a"]


@pytest.mark.parametrize("busy", [{"restoring": True}, {"full_requests": 2}])
def test_replica_that_had_to_stay_from_the_first_look_on_must_not_leave(
    busy: dict[str, Any],
) -> None:
    held, gone = {"a": state("a", **busy)}, frozenset({"a"})
    short = [look(0, states=held), look(1, leaving=gone)]
    long = [*(look(t, states=held) for t in (0, 1, 2, 3)), look(4, leaving=gone)]
    assert broken_promises(short, SEEN_AFTER_S) == []
    assert broken_promises(long, SEEN_AFTER_S) == ["a"]


def test_replica_is_blamed_once_and_others_are_not() -> None:
    both = {"a": state("a"), "b": state("b", restoring=True)}
    looks = [look(0, states={"b": state("b")}), *(look(t, states=both) for t in range(1, 6))]
    looks += [look(t, leaving=frozenset({"a", "b"})) for t in (6, 7)]
    assert broken_promises(looks, SEEN_AFTER_S) == ["b"]


def test_look_counts_stopping_replicas_apart() -> None:
    entries = [
        {"replica_id": name, "standing": standing, "state": state(name).model_dump(mode="json")}
        for name, standing in (("a", "live"), ("b", "draining"), ("c", "stale"))
    ]
    seen = look_of({"replicas": entries}, {"RUNNING": 1, "STARTING": 2, "STOPPING": 1}, 5.0)
    assert (seen.running, seen.target, seen.stopping) == (1, 3, 1)
    assert set(seen.states) == {"a"}
    assert seen.leaving == {"b"}


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s`:DeprecationWarning")
def test_fleet_passes_the_check_of_configurations(tmp_path: Path) -> None:
    file = tmp_path / "burst.yaml"
    placed = burst_config().placed(port=8000, model_source=str(tmp_path))
    assert placed.replicas == 1
    assert placed.max_replicas == MAX_REPLICAS
    file.write_text(yaml.safe_dump(placed.content))
    assert validate_file(file) == []


def test_burst_is_one_recorded_burst_that_fits_the_model() -> None:
    load = BurstLoad()
    trace = load.requests(copies=4)
    assert len(trace) == 4 * len(load.recorded())
    gaps_s = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(trace)]
    assert max(gaps_s) < 2.0 * load.stretch
    context = burst_config().max_model_len
    assert all(each.prompt_tokens + each.output_tokens <= context for each in trace)


def test_slower_machine_gets_fewer_requests_for_the_same_load() -> None:
    load = BurstLoad(open_requests=8)
    span_s = load.recorded()[-1].arrival_s
    for request_s in (0.5, 2.0):
        sent = len(load.requests(load.copies(request_s)))
        assert sent * request_s / span_s == pytest.approx(8.0, rel=0.2)
