"""One small Ray cluster for the room's cluster tests, on ports of its own."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import ray
from dps_deployments.controller_client import CONTROLLER_DEPLOYMENT
from ray import cloudpickle, serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from . import cheap

HTTP_PORT = 48210


@dataclass(frozen=True)
class Cluster:
    """A running Serve instance."""

    url: str

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/dps/status", timeout=5.0).raise_for_status().json())

    def replicas(self, app: str) -> list[dict[str, Any]]:
        """Entries of one application's replicas; other tests' replicas are forgotten slowly."""
        return [
            entry
            for entry in self.status()["replicas"]
            if entry["state"] is not None and entry["state"]["deployment"].startswith(f"{app}#")
        ]

    def configure(self, user_config: dict[str, Any]) -> None:
        """Deploy the controller with this ``user_config``, the way ``serve deploy`` does.

        Only a config file makes that an update in place: from Python every deployment is new code.
        """
        application = {
            "name": cheap.CONTROLLER_APP,
            "route_prefix": "/dps",
            "import_path": "dps_deployments.app:build_controller",
            "deployments": [{"name": CONTROLLER_DEPLOYMENT, "user_config": user_config}],
        }
        schema = ServeDeploySchema.model_validate({"applications": [application]})
        _get_global_client().deploy_apps(schema, _blocking=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    # A token file left behind by some other Ray would turn authentication on.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    # Autoscaling figures every half second, not every ten.
    os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.5"
    os.environ["RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.5"
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
