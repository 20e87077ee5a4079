"""The fleet of real engines that the tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from dps_deployments.app import build_fleet
from ray import cloudpickle, serve

from ..cluster import Cluster
from .llm import llm_args

_deployed: list[str] = []


@pytest.fixture(scope="session")
def two_ranks_from_now_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make this file, and replicas that start have two tensor-parallel ranks."""
    return tmp_path_factory.mktemp("ranks") / "two"


@pytest.fixture
def api(cluster: Cluster, two_ranks_from_now_on: Path) -> Iterator[httpx.Client]:
    """Deployed for the first test of the folder, and again after those of another."""
    if not _deployed:
        # Loads Ray's LLM server, which takes seconds.
        from . import ranks

        _deployed.append("llm")
        cloudpickle.register_pickle_by_value(ranks)
        two_ranks_from_now_on.unlink(missing_ok=True)
        server = ranks.growing_server(two_ranks_from_now_on)
        cluster.run(build_fleet(llm_args(server)), "llm", "/")
    with httpx.Client(base_url=cluster.url, timeout=120.0) as client:
        yield client


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Other folders' tests need the memory; folders that are no packages have no scope."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        while _deployed:
            serve.delete(_deployed.pop())
