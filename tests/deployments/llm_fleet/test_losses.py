"""Parts of a real fleet die while requests run."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from dps_ray.chaos.faults import Fault
from dps_ray.chaos.load import LoadOptions
from dps_ray.chaos.run import Target, run_chaos
from dps_ray.chaos.verdict import table

from ..cluster import Cluster
from .llm import MODEL, processes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


def test_killed_engine_and_killed_controller_cost_no_request(
    api: httpx.Client, cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """What had no token is answered by the other replica; what had some ends with a clear error."""
    report = asyncio.run(
        run_chaos(
            Target(cluster.url, MODEL, 2, processes),
            [Fault.ENGINE, Fault.CONTROLLER],
            duration_s=0.0,
            load=LoadOptions(clients=12, wave_s=4.0, calm_s=2.0, output_tokens=(30, 60)),
            seed=0,
            settle_s=2.0,
            say=print,
        )
    )
    print(table(report))
    record_property("faults", report.figures["faults"])
    assert report.ok, report.as_dict()
