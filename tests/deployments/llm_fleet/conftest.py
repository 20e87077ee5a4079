"""The fleet of real engines that the tests of this folder share."""

from collections.abc import Iterator

import httpx
import pytest
from dps_deployments.app import build_fleet
from ray import serve

from ..cluster import Cluster
from .llm import llm_args

_deployed: list[str] = []


@pytest.fixture
def api(cluster: Cluster) -> Iterator[httpx.Client]:
    """Deployed for the first test of the folder, and again after those of another."""
    if not _deployed:
        _deployed.append("llm")
        cluster.run(build_fleet(llm_args()), "llm", "/")
    with httpx.Client(base_url=cluster.url, timeout=120.0) as client:
        yield client


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Other folders' tests need the memory; folders that are no packages have no scope."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        while _deployed:
            serve.delete(_deployed.pop())
