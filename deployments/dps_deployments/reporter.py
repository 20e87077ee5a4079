"""The push loop of a replica: look often, report transitions at once and heartbeats otherwise."""

import asyncio
import time
from collections.abc import Callable

from dps_deployments.controller_client import (
    RETRY_PERIOD_S,
    ControllerClient,
    ControllerUnavailableError,
)
from dps_ray.fleet.reporting import ReportOptions, ReportSchedule
from dps_ray.fleet.state import ReplicaState


async def report_forever(
    client: ControllerClient, read: Callable[[], ReplicaState], options: ReportOptions
) -> None:
    """Push what ``read`` returns whenever it is due, until cancelled.

    A report that the controller did not take stays due and is read afresh before the next try.
    """
    schedule = ReportSchedule(options)
    while True:
        state = read()
        if schedule.is_due(state, time.monotonic()):
            try:
                await client.report(state.model_dump(mode="json"))
            except ControllerUnavailableError:
                await asyncio.sleep(RETRY_PERIOD_S)
                continue
            schedule.delivered(state, time.monotonic())
        await asyncio.sleep(options.poll_period_s)
