"""Parts of a real fleet die while requests run."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from dps_ray.chaos.faults import Fault, find
from dps_ray.chaos.load import LoadOptions
from dps_ray.chaos.run import Target, run_chaos
from dps_ray.chaos.verdict import table
from dps_ray.report import Report

from ..cluster import Cluster, processes
from .llm import MODEL, REPLICAS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_killed_engine_controller_and_rank_cost_no_request(
    api: httpx.Client,
    cluster: Cluster,
    two_ranks_from_now_on: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """What had no token is answered by the other replica; what had some ends with a clear error."""
    two_ranks_from_now_on.touch()
    try:
        # The replica that Serve starts for the dead one has a rank more than that one had.
        first = hurt(cluster.url, [Fault.ENGINE, Fault.CONTROLLER], without_second_ranks)
        assert find(Fault.RANK, processes()), "no replica with two ranks"
        second = hurt(cluster.url, [Fault.RANK], processes)
    finally:
        two_ranks_from_now_on.unlink()
    record_property("faults", first.figures["faults"] + second.figures["faults"])
    for report in (first, second):
        print(table(report))
        assert report.ok, report.as_dict()


def hurt(url: str, faults: Sequence[Fault], fleet: Callable[[], set[int]]) -> Report:
    return asyncio.run(
        run_chaos(
            # On a machine that stands still for seconds. vLLM tells of a dead rank after nine.
            Target(url, MODEL, REPLICAS, fleet, out_of_routing_s=5.0),
            faults,
            duration_s=0.0,
            load=LoadOptions(
                deadline_s=180.0, clients=12, wave_s=4.0, calm_s=2.0, output_tokens=(30, 60)
            ),
            seed=0,
            settle_s=2.0,
            say=print,
        )
    )


def without_second_ranks() -> set[int]:
    started = processes()
    return started - set(find(Fault.RANK, started))
