"""Clients of a real fleet under pressure that insist on full precision."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from dps_ray.floors.check import sixteen_bit_answers
from dps_ray.floors.clients import FloorLoad, ask_fleet
from dps_ray.floors.verdict import judge, table
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny
from dps_ray.report import Report

from ..cluster import Cluster
from .llm import MODEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


def test_answers_that_insist_on_full_precision_are_those_of_a_static_16_bit_engine(
    api: httpx.Client, cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    load = FloorLoad(requests=200)
    reference = sixteen_bit_answers(make_tiny("qwen3", cache_root()), load)
    outcome = asyncio.run(ask_fleet(cluster.url, MODEL, load, print))
    report = Report("check floors")
    judge(report, outcome, reference, load.max_tokens, patience_s=60.0)
    print(table(report))
    record_property("floors", report.figures["floors"])
    assert report.ok, report.as_dict()
