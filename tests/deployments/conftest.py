"""One small Ray cluster for the room's cluster tests, on a port of its own."""

import sys
from collections.abc import Iterator

import pytest
import ray
from ray import cloudpickle, serve

from dps_ray.cli.admin import TOKEN_VARIABLE
from dps_ray.demo.serve_config import free_port

from . import cheap
from .cheap import cheap_app
from .cluster import ADMIN_TOKEN, Cluster
from .fleet import Fleet, deployed, until
from .statuses import IDLE


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cloudpickle.register_pickle_by_value(sys.modules[cheap.__name__])
    with pytest.MonkeyPatch.context() as patch:
        # A token file left behind by some other Ray would turn authentication on.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv(TOKEN_VARIABLE, ADMIN_TOKEN)
        # A dead proxy is replaced after three failed checks: half a minute by default.
        patch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
        # What Serve is asked to wait for it looks at once a second.
        patch.setattr("ray.serve._private.client.CLIENT_POLLING_INTERVAL_S", 0.1)
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200_000_000,
            log_to_driver=False,
        )
        try:
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            running = Cluster(f"http://127.0.0.1:{port}")
            running.configure({})
            yield running
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture(scope="session")
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    """One for all modules."""
    with deployed(cluster, cheap_app()) as fleet:
        yield fleet


@pytest.fixture
def calm(fleet: Fleet) -> None:
    """Every test starts with two idle replicas, the default policy and a listening router."""
    if fleet.cluster.status()["config"]["routing"]["name"] != "mode_aware":
        fleet.cluster.configure({})
    for replica_id in fleet.pages:
        fleet.set(replica_id, IDLE)
    fleet.ask(1)
    until(lambda: fleet.cluster.status()["listening_routers"] >= 1)
