"""``GET /dps/explain``: the controller asks the router that remembers a request."""

import asyncio
import time
from typing import Any

import httpx
import numpy as np
import pytest
from dps_deployments import explanations
from dps_deployments.explanations import Explanations
from fastapi import HTTPException

from dps_ray.cli.explain import lines
from dps_ray.cli.main import main
from dps_ray.fleet.ask import Ask
from dps_ray.fleet.coordinator import Coordinator
from dps_ray.fleet.policies import LeastPressure, ModeAware
from dps_ray.fleet.publication import ControllerOptions, Publication
from dps_ray.fleet.routing import Peer
from dps_ray.fleet.scorers import Precision, Queue
from dps_ray.fleet.tally import DryRun, RouterReport
from dps_ray.fleet.view import FleetView
from dps_ray.modes import Floor, Mode

from .. import played_time
from ..fleet.builders import replica_state


class Played:
    """A controller's core that knows two replicas, and one router of theirs."""

    def __init__(self, options: ControllerOptions) -> None:
        self.coordinator = Coordinator(options, lambda: 0.0)
        self.explanations = Explanations(self.coordinator)
        self.view = FleetView(np.random.default_rng(0))
        for name, mode in (("slow", Mode.FAST), ("good", Mode.FULL)):
            self.hear(name, mode=mode)
        self.view.offer([Peer("slow"), Peer("good")], 0.0)
        self.view.merge(
            Publication(
                snapshot=self.coordinator.aggregate.snapshot(),
                routing=options.routing,
                freshness=options.ageing,
            ),
            0.0,
        )
        self.report()

    def hear(self, replica_id: str, **changes: Any) -> None:
        changes = {"deployment": "llm#model", **changes}
        self.coordinator.report(replica_state(replica_id, **changes))

    def report(self) -> list[str]:
        """The router reports as it does once a second."""
        sent = self.view.report("router", "llm").model_dump(mode="json")
        taken, wanted = self.explanations.take(RouterReport.model_validate(sent))
        self.coordinator.routers.note(taken)
        return wanted

    def would(self, ask: Ask | None = None, **names: str) -> dict[str, Any]:
        return self.explanations.would(
            ask or Ask(),
            application=names.get("application"),
            policy=names.get("policy"),
            replica=names.get("replica"),
        )


def played(monkeypatch: pytest.MonkeyPatch, options: ControllerOptions | None = None) -> Played:
    monkeypatch.setattr(explanations, "ANSWER_PERIOD_S", 0.0)
    monkeypatch.setattr(explanations, "LOOK_UP_S", 60.0)
    return Played(options or ControllerOptions())


def test_new_request_is_explained_and_one_replica_beside_the_first_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = played(monkeypatch)
    answer = fleet.would(Ask(floor=Floor.FULL))
    assert answer["choice"] == "good"
    text = "\n".join(lines(answer))
    assert "a new request to llm: floor full, policy mode_aware, 1 routers" in text
    assert "slow  excluded" in text
    assert "gets nothing: left out by filter floor (live, 0.0 s old)" in text
    assert "since the replicas reported" in text
    only = fleet.would(Ask(floor=Floor.FULL), replica="good")
    assert [each["replica_id"] for each in only["candidates"]] == ["good"]


def test_policy_is_explained_with_the_parameters_it_has_in_the_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ControllerOptions(
        routing=ModeAware(mode=Precision(weight=0.7)),
        dry_run=DryRun(policy=LeastPressure(queue=Queue(weight=0.5))),
    )
    fleet = played(monkeypatch, options)
    assert fleet.would(policy="mode_aware")["policy"]["mode"]["weight"] == 0.7
    assert fleet.would(policy="least_pressure")["policy"]["queue"]["weight"] == 0.5
    assert fleet.would(policy="full_first")["policy"]["name"] == "full_first"


def test_past_request_is_looked_up_at_the_router_that_routed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = played(monkeypatch)
    fleet.view.decide(0.1, Ask(floor=Floor.FULL), limit=9, request_id="r-1")
    fleet.view.tally.accepted("r-1", "good")

    async def play() -> dict[str, Any]:
        asked = asyncio.create_task(fleet.explanations.did("r-1", replica=None))
        await asyncio.sleep(0)
        wanted = fleet.report()
        assert wanted == ["r-1"]
        assert fleet.view.tally.look_up(wanted)
        assert fleet.report() == []
        return await asked

    answer = asyncio.run(play())
    assert (answer["accepted_by"], answer["choice"], answer["floor"]) == ("good", "good", "full")
    text = "\n".join(lines(answer))
    assert "request r-1, " in text
    assert "taken by good" in text
    assert "gets nothing: left out by filter floor" in text
    # The status, which anybody reads every second, stays as small as it was.
    ((_, report),) = fleet.coordinator.routers.reports()
    assert report.found == ()


def test_request_that_no_router_remembers_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = played(monkeypatch)
    with pytest.raises(HTTPException, match="none of 1 routers remembers request 'lost'") as raised:
        played_time.run(monkeypatch, fleet.explanations.did("lost", replica=None))
    assert raised.value.status_code == 404
    assert fleet.report() == []


def test_names_that_mean_nothing_are_refused_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = played(monkeypatch)
    with pytest.raises(HTTPException, match="404: replica is 'nobody': candidates are good, slow"):
        fleet.would(replica="nobody")
    with pytest.raises(HTTPException, match="400: policy is 'best': choose one of round_robin, "):
        fleet.would(policy="best")
    with pytest.raises(HTTPException, match="400: application is 'other': known are llm"):
        fleet.would(application="other")
    fleet.hear("c", deployment="second#model")
    with pytest.raises(HTTPException, match="400: application is None: known are llm, second"):
        fleet.would()


def test_no_more_is_explained_than_the_controller_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = played(monkeypatch)
    monkeypatch.setattr(explanations, "ANSWER_PERIOD_S", 60.0)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    fleet.would()
    with pytest.raises(HTTPException) as raised:
        fleet.would()
    assert (raised.value.status_code, raised.value.headers) == (429, {"Retry-After": "60"})


def test_answer_about_a_past_request_waits_for_its_turn_and_takes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = played(monkeypatch)
    monkeypatch.setattr(explanations, "ANSWER_PERIOD_S", 0.1)
    fleet.view.decide(0.1, Ask(), limit=9, request_id="r-1")
    answered_s: list[float] = []

    async def ask() -> None:
        await fleet.explanations.did("r-1", replica=None)
        answered_s.append(time.monotonic())

    async def play() -> None:
        fleet.would()
        answered_s.append(time.monotonic())
        asked = [asyncio.create_task(ask()) for _ in range(4)]
        await asyncio.sleep(0)
        fleet.view.tally.look_up(fleet.report())
        fleet.report()
        # One that leaves takes no turn.
        asked.pop().cancel()
        await asyncio.gather(*asked)
        with pytest.raises(HTTPException, match="429: one answer in"):
            fleet.would()

    played_time.run(monkeypatch, play())
    assert np.diff(answered_s) == pytest.approx([0.1] * 3)


def test_callers_are_counted_and_not_the_requests_that_they_ask_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = played(monkeypatch)
    monkeypatch.setattr(explanations, "MAX_WAITING", 3)
    monkeypatch.setattr(explanations, "LOOK_UP_S", 60.0)

    async def play() -> None:
        asked = [asyncio.create_task(fleet.explanations.did("r-1", replica=None)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match="429: others ask"):
            await fleet.explanations.did("r-1", replica=None)
        asked[0].cancel()
        await asyncio.wait(asked[:1])
        # Those that still wait for it go on waiting.
        assert fleet.report() == ["r-1"]
        for each in asked:
            each.cancel()
        await asyncio.wait(asked)
        assert fleet.report() == []

    asyncio.run(play())


def test_caller_that_gives_up_takes_no_answer_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = played(monkeypatch)
    fleet.view.decide(0.1, Ask(), limit=9, request_id="r-1")

    async def play() -> dict[str, Any]:
        monkeypatch.setattr(explanations, "LOOK_UP_S", 0.1)
        first = asyncio.create_task(fleet.explanations.did("r-1", replica=None))
        await asyncio.sleep(0)
        monkeypatch.setattr(explanations, "LOOK_UP_S", 60.0)
        second = asyncio.create_task(fleet.explanations.did("r-1", replica=None))
        with pytest.raises(HTTPException, match="404"):
            await first
        fleet.view.tally.look_up(fleet.report())
        fleet.report()
        return await second

    assert asyncio.run(play())["request_id"] == "r-1"


def test_command_asks_once_more_when_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = played(monkeypatch).would()
    refused = httpx.Response(429, json={"detail": "ask again"}, headers={"Retry-After": "2"})
    replies = [refused, httpx.Response(200, json=answer), refused, refused]
    waited_s: list[float] = []
    monkeypatch.setattr(httpx, "get", lambda *_, **__: replies.pop(0))
    monkeypatch.setattr("dps_ray.cli.explain.time.sleep", waited_s.append)
    assert main(["explain"]) == 0
    assert "a new request to llm" in capsys.readouterr().out
    assert waited_s == [2.0]
    assert main(["explain"]) == 2
    assert "refuses with 429: ask again" in capsys.readouterr().err
    assert replies == []
