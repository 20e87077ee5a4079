"""A running Serve instance as tests see it."""

import time
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from dps_deployments.controller_client import CONTROLLER_DEPLOYMENT
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from . import cheap

ADMIN_TOKEN = "token-of-the-test-cluster"
ADMIN_PORT = 48211
PATIENCE_S = 60.0
PATIENT = {"ageing": {"stale_after_s": 8.0}}
"""A replica that the machine lets stand still for seconds is not out of routing for it."""


@dataclass(frozen=True)
class Cluster:
    """A running Serve instance."""

    url: str

    def run(self, app: serve.Application, name: str, prefix: str) -> None:
        """Deploy an application and wait until the proxy knows the way there.

        Serve calls an application ready before its proxies have heard of it: they answer 404.
        """
        serve.run(app, name=name, route_prefix=prefix)
        deadline_s = time.monotonic() + PATIENCE_S
        while prefix not in httpx.get(f"{self.url}/-/routes", timeout=PATIENCE_S).json():
            assert time.monotonic() < deadline_s, f"the proxy never heard of {prefix}"
            time.sleep(0.05)

    def status(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/dps/status", timeout=timeout_s)
        return dict(answer.raise_for_status().json())

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
            "deployments": [
                {"name": CONTROLLER_DEPLOYMENT, "user_config": {**PATIENT, **user_config}}
            ],
        }
        schema = ServeDeploySchema.model_validate({"applications": [application]})
        _get_global_client().deploy_apps(schema, _blocking=True)


def processes() -> set[int]:
    """All that this process has started, Ray with its applications among them."""
    return {child.pid for child in psutil.Process().children(recursive=True)}
