"""The push loop of a replica: look often, report transitions at once and heartbeats otherwise."""

import asyncio
import logging
import time
from collections.abc import Callable

from pydantic import ValidationError

from dps_deployments.controller_client import (
    ControllerClient,
    ControllerUnavailableError,
    retries,
)
from dps_ray.fleet.coordinator import Reply
from dps_ray.fleet.permits import ReplicaPermits
from dps_ray.fleet.reporting import ReportOptions, ReportSchedule
from dps_ray.fleet.state import ReplicaState

RETRY_HEARTBEATS = 2.0
"""A replica that is not answered calls again after so many heartbeats at most: a controller that is
back knows a small fleet soon, and one that is slow gets fewer calls than from a healthy fleet."""

logger = logging.getLogger("ray.serve")


async def report_forever(
    client: ControllerClient,
    read: Callable[[], ReplicaState],
    permits: ReplicaPermits,
    obey: Callable[[], None],
    options: ReportOptions,
) -> None:
    """Push what ``read`` returns whenever it is due, until cancelled.

    A report that the controller did not take stays due and is read afresh before the next try.

    Parameters
    ----------
    client
        Way to the controller.
    read
        Takes one reading of the replica.
    permits
        Learns the controller's answers.
    obey
        Hands the permits to the engine; called at every look, because they also change by time.
    options
        Periods.
    """
    schedule = ReportSchedule(options)
    pauses = retries(RETRY_HEARTBEATS * options.heartbeat_s)
    while True:
        obey()
        state = read()
        if client.is_cut_off or schedule.is_due(state, time.monotonic()):
            sent_at_s = time.monotonic()
            if permits.sending(state, sent_at_s):
                # The engine loses the lease before the controller can pass it on. What it began on
                # that lease since the reading is told with this report.
                obey()
                state = read()
            try:
                reply = Reply.model_validate(await client.report(state.model_dump(mode="json")))
            except ControllerUnavailableError:
                await asyncio.sleep(pauses.failed())
                continue
            except ValidationError as error:
                # To such a controller the replica is as good as alone; its engine is well.
                logger.error("reply of another release is not understood: %s", error)
                await asyncio.sleep(options.heartbeat_s)
                continue
            pauses.succeeded()
            permits.answered(reply, sent_at_s)
            schedule.delivered(state, time.monotonic())
            obey()
        await asyncio.sleep(options.poll_period_s)
