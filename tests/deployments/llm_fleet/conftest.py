"""The fleet of real engines that the tests of this folder share."""

from collections.abc import Iterator

import httpx
import pytest
from dps_deployments.app import build_fleet
from ray import serve

from ..cluster import Cluster
from .llm import llm_args


@pytest.fixture(scope="package")
def api(cluster: Cluster) -> Iterator[httpx.Client]:
    cluster.run(build_fleet(llm_args()), "llm", "/")
    with httpx.Client(base_url=cluster.url, timeout=120.0) as client:
        yield client
    serve.delete("llm")
