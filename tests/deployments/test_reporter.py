"""The push loop of a replica meets answers it does not expect."""

import asyncio
from typing import Any, cast

import pytest
from dps_deployments.controller_client import ControllerClient
from dps_deployments.probe import ReplicaProbe
from dps_deployments.ray_adapter import ReplicaIdentity
from dps_deployments.reporter import report_forever

from dps_ray.fleet.permits import ReplicaPermits
from dps_ray.fleet.reporting import ReportOptions


class NewerController:
    """Answers with a verdict that this release does not know."""

    def __init__(self) -> None:
        self.reports = 0

    async def report(self, state: dict[str, Any]) -> dict[str, Any]:
        self.reports += 1
        return {"verdict": "deferred", "lease": False, "may_go_fast": True, "terms": {}}


def test_reply_that_is_not_understood_does_not_end_the_reports() -> None:
    permits = ReplicaPermits("r1", 0.0)
    probe = ReplicaProbe(ReplicaIdentity("r1", "llm#model", "node"), "1", permits, lambda: False)
    controller = NewerController()

    async def run() -> None:
        options = ReportOptions(poll_period_s=0.005, heartbeat_s=0.01)
        client = cast(ControllerClient, controller)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await report_forever(client, probe.read, permits, lambda: None, options)

    asyncio.run(run())
    assert controller.reports > 1
