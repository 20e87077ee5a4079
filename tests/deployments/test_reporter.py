"""The push loop of a replica meets answers it does not expect."""

import asyncio
import time
from typing import Any, cast

import pytest
from dps_deployments.controller_client import ControllerClient
from dps_deployments.probe import ReplicaProbe
from dps_deployments.ray_adapter import ReplicaIdentity
from dps_deployments.reporter import report_forever

from dps_ray.fleet.coordinator import Reply
from dps_ray.fleet.leases import LeaseOptions
from dps_ray.fleet.permits import ReplicaPermits
from dps_ray.fleet.reporting import ReportOptions
from dps_ray.fleet.table import Verdict
from dps_ray.status import EngineStatus

from .statuses import IDLE, RESTORING


def idle() -> bool:
    return False


class HeardError(Exception):
    """A report has been taken in."""


class NewerController:
    """Answers with a verdict that this release does not know, and ends at the second report."""

    is_cut_off = False

    def __init__(self) -> None:
        self.reports = 0

    async def report(self, state: dict[str, Any]) -> dict[str, Any]:
        self.reports += 1
        if self.reports == 2:
            raise HeardError
        return {"verdict": "deferred", "lease": False, "may_go_fast": True, "terms": {}}


def test_reply_that_is_not_understood_does_not_end_the_reports() -> None:
    permits = ReplicaPermits("r1", 0.0)
    probe = ReplicaProbe(ReplicaIdentity("r1", "llm#model", "node"), "1", permits, lambda: False)
    controller = NewerController()

    async def run() -> None:
        options = ReportOptions(poll_period_s=0.005, heartbeat_s=0.01, lease_poll_s=0.01)
        client = cast(ControllerClient, controller)
        async with asyncio.timeout(60.0):
            await report_forever(client, probe.read, permits, lambda: None, options)

    with pytest.raises(HeardError):
        asyncio.run(run())


class LastWord:
    """Ends the push loop at the first report, and keeps it and what the page allowed then."""

    is_cut_off = False

    def __init__(self) -> None:
        self.page_until_s: float | None = None
        self.state: dict[str, Any] = {}
        self.allowed_s: float | None = None

    async def report(self, state: dict[str, Any]) -> dict[str, Any]:
        self.state, self.allowed_s = state, self.page_until_s
        raise HeardError


@pytest.mark.parametrize("later", [IDLE, RESTORING], ids=["idle", "restoring"])
def test_lease_is_gone_from_the_page_before_the_report_that_gives_it_back(
    later: EngineStatus,
) -> None:
    """An engine that began to restore between the look and the page says so in that report."""
    now_s = time.monotonic()
    permits = ReplicaPermits("r1", now_s)
    granted = Reply(verdict=Verdict.REFRESH, lease=True, may_go_fast=True, terms=LeaseOptions())
    permits.answered(granted, now_s)
    assert permits.has_lease(now_s)
    probe = ReplicaProbe(ReplicaIdentity("r1", "llm#model", "node"), "1", permits, lambda: False)
    readings = iter([IDLE, later])
    probe.engine_started(lambda: False, lambda: next(readings), idle)
    controller = LastWord()

    def obey() -> None:
        controller.page_until_s = permits.restore_until_s(time.monotonic())

    with pytest.raises(HeardError):
        asyncio.run(
            report_forever(
                cast(ControllerClient, controller), probe.read, permits, obey, ReportOptions()
            )
        )
    assert controller.allowed_s == 0.0
    assert controller.state["restoring"] is later.restoring
