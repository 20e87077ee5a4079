"""The fleet of real engines that the tests of this folder share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from dps_deployments.app import build_fleet
from ray import serve

from ..cluster import Cluster
from .llm import complete, llm_args


@pytest.fixture(scope="package")
def api(cluster: Cluster) -> Iterator[httpx.Client]:
    cluster.run(build_fleet(llm_args()), "llm", "/")
    with httpx.Client(base_url=cluster.url, timeout=120.0) as client:
        # The first step of an engine takes seconds.
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: complete(client), range(8)))
        yield client
    serve.delete("llm")
