"""One small Ray cluster for the room's cluster tests, on ports of its own."""

import os
import sys
from collections.abc import Iterator

import pytest
import ray
from ray import cloudpickle, serve

from dps_ray.cli.admin import TOKEN_VARIABLE
from dps_ray.engine.status_page import StatusPage

from . import cheap
from .cheap import cheap_app, page_key
from .cluster import ADMIN_TOKEN, Cluster
from .fleet import Fleet, until
from .statuses import IDLE

HTTP_PORT = 48210


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    # A token file left behind by some other Ray would turn authentication on.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ[TOKEN_VARIABLE] = ADMIN_TOKEN
    cloudpickle.register_pickle_by_value(sys.modules[cheap.__name__])
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200_000_000,
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": HTTP_PORT})
        running = Cluster(f"http://127.0.0.1:{HTTP_PORT}")
        running.configure({})
        yield running
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    cluster.run(cheap_app(), "cheap", "/cheap")

    def live() -> list[str]:
        """Not those of a fleet before, which are forgotten slowly."""
        entries = cluster.replicas("cheap")
        return [entry["replica_id"] for entry in entries if entry["standing"] == "live"]

    until(lambda: len(live()) == 2)
    ids = live()
    pages = {replica_id: StatusPage.attach(page_key(replica_id)) for replica_id in ids}
    fleet = Fleet(cluster, pages)
    yield fleet
    serve.delete("cheap")
    for page in pages.values():
        page.remove()


@pytest.fixture
def calm(fleet: Fleet) -> None:
    """Every test starts with two idle replicas, the default policy and a listening router."""
    if fleet.cluster.status()["config"]["routing"]["name"] != "mode_aware":
        fleet.cluster.configure({})
    for replica_id in fleet.pages:
        fleet.set(replica_id, IDLE)
    fleet.ask(1)
    until(lambda: fleet.cluster.status()["listening_routers"] >= 1)
