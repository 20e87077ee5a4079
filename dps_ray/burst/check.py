"""``dps-ray check autoscaling``: a small real fleet that grows in a burst and shrinks after it."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from dps_ray.bench.autoscaling_plot import draw_autoscaling
from dps_ray.bench.client import open_http
from dps_ray.bench.records import RequestRecord
from dps_ray.burst.fleet import (
    BASE_BLOCKS,
    MIN_REPLICAS,
    OPTIONS,
    REPORT_S,
    burst_config,
)
from dps_ray.burst.load import BurstLoad, measure_request_s, send
from dps_ray.burst.verdict import judge, text
from dps_ray.burst.watch import LOOK_PERIOD_S, Look, Watch
from dps_ray.chaos.fleet import MODEL, START_TIMEOUT_S
from dps_ray.demo.fleet import running_fleet
from dps_ray.fleet.reporting import ReportOptions
from dps_ray.models.tiny import make_tiny
from dps_ray.report import Report

AUTH_MODE = "RAY_AUTH_MODE"
CALM_TIMEOUT_S = 150.0
"""Two steps down with ``calm_s`` before each, and the engines' ends."""
STEADY_S = 15.0
"""So long the calm fleet must keep its size."""
SEEN_AFTER_S = REPORT_S + ReportOptions().heartbeat_s + 2 * LOOK_PERIOD_S


def check_autoscaling(
    root: Path, load: BurstLoad, *, picture: Path | None, say: Callable[[str], None]
) -> Report:
    """Start a fleet of one replica, send a burst, judge what its size did, stop it.

    Parameters
    ----------
    root
        Folder of the tiny model.
    load
        What is sent.
    picture
        PNG file to write, if any.
    say
        Gets lines for people.

    Raises
    ------
    FleetError
        The fleet does not start, or something of it could not be stopped.
    """
    report = Report("check autoscaling")
    model = make_tiny("qwen3", root)
    with running_fleet(burst_config(), str(model)) as fleet:
        fleet.wait_until_ready(START_TIMEOUT_S, lambda line: say(f"... {line}"))
        with _connected(fleet.address):
            looks, records = asyncio.run(_run(fleet.url, load, say))
    judge(
        report,
        looks,
        records,
        OPTIONS,
        minimum=MIN_REPLICAS,
        seen_after_s=SEEN_AFTER_S,
    )
    if picture is not None:
        draw_autoscaling(picture, looks, BASE_BLOCKS, "a real fleet in a recorded burst", records)
    say(text(report.figures))
    return report


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect to a Ray cluster without a token, whatever other clusters have left."""
    left = os.environ.get(AUTH_MODE)
    os.environ[AUTH_MODE] = "disabled"
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        yield
    finally:
        ray.shutdown()
        if left is None:
            del os.environ[AUTH_MODE]
        else:
            os.environ[AUTH_MODE] = left


async def _run(
    url: str, load: BurstLoad, say: Callable[[str], None]
) -> tuple[list[Look], list[RequestRecord]]:
    async with open_http(url) as http:
        request_s = await measure_request_s(http, MODEL, load)
        trace = load.requests(load.copies(request_s))
        watch = Watch(http)
        async with watch.running():
            say(
                f"... a request takes {request_s:.1f} s: {len(trace)} requests in "
                f"{trace[-1].arrival_s:.0f} s"
            )
            records = await send(http, MODEL, trace, load)
            say("... all requests have ended")
            await _until_calm(watch)
        return watch.looks, records


async def _until_calm(watch: Watch) -> None:
    """Wait until the fleet has been at its smallest for ``STEADY_S``, or too long."""
    began_s = watch.now_s
    while watch.now_s - began_s < CALM_TIMEOUT_S:
        recent = [look for look in watch.looks if look.time_s > watch.now_s - STEADY_S]
        if recent and all(look.target == MIN_REPLICAS and not look.stopping for look in recent):
            return
        await asyncio.sleep(LOOK_PERIOD_S)
