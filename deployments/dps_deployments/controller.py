"""The fleet controller as a Serve deployment: reports in, publications and status out.

One replica with soft state in an application of its own, so that redeploying the models does not
touch it. When it dies Serve starts another, which knows the fleet again after one heartbeat;
meanwhile replicas keep serving and routers keep routing on what they know.
"""

import logging
import socket
import time
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pydantic_core
from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse
from ray import serve

from dps_deployments.admin_calls import AdminCalls, admin_api
from dps_deployments.controller_client import CONTROLLER_DEPLOYMENT
from dps_deployments.direct_calls import DirectCalls
from dps_deployments.direct_client import KEEP_ALIVE_S
from dps_deployments.explanations import Explanations
from dps_deployments.fleet_calls import FleetCalls
from dps_deployments.listener import Listener, host_and_port
from dps_deployments.ray_adapter import node_ip
from dps_ray.config import DpsConfigError
from dps_ray.fleet.aggregate import FleetAggregate
from dps_ray.fleet.ask import Ask
from dps_ray.fleet.coordinator import Coordinator
from dps_ray.fleet.orders import FLEET
from dps_ray.fleet.publication import ControllerOptions, parse_controller_options
from dps_ray.fleet.state import ReplicaState
from dps_ray.fleet.tally import RouterReport
from dps_ray.fleet.ways import Access
from dps_ray.modes import Floor

ADMIN_KEEP_ALIVE_S = 2
STATUS_AGE_S = 0.25
"""An answer to ``GET /status`` is handed out for so long: whoever may ask cannot take the loop that
answers replicas for more than one encoding each."""
PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)

logger = logging.getLogger("ray.serve")
status_api = FastAPI(title="DPS fleet", docs_url=None, redoc_url=None)


class FleetController:
    """Serve deployment around ``Coordinator``."""

    def __init__(self) -> None:
        self._started_at_s = time.monotonic()
        self._configured = False
        self._config_error: str | None = None
        self._coordinator = Coordinator(
            ControllerOptions(),
            time.monotonic,
            # Wall-clock milliseconds: a restarted controller continues above the versions of the
            # one before it.
            first_version=int(time.time() * 1000),
        )
        self._explanations = Explanations(self._coordinator)
        self._calls = FleetCalls(self._coordinator, self._explanations)
        self._by_handle = 0
        self._direct_calls = DirectCalls(self._calls)
        self._direct = Listener(
            self._direct_calls,
            section="direct",
            purpose="calls of replicas and routers",
            keep_alive_s=KEEP_ALIVE_S,
        )
        self._admin = Listener(
            admin_api(AdminCalls(self._coordinator)),
            section="admin",
            purpose="admin calls",
            keep_alive_s=ADMIN_KEEP_ALIVE_S,
        )
        self._encoded = b""
        self._encoded_at_s = float("-inf")

    async def reconfigure(self, user_config: Any) -> None:
        """Apply the operator's ``user_config``; routers have it at their next answer.

        A wrong first configuration fails the deployment. Later ones are refused and shown in the
        status: a typing error must not take a working controller down.

        Raises
        ------
        DpsConfigError
            On a wrong first configuration.
        """
        try:
            options = parse_controller_options(user_config)
        except DpsConfigError as error:
            if not self._configured:
                raise
            self._config_error = str(error)
            self._encoded_at_s = float("-inf")
            logger.error("keeping the previous configuration: %s", error)
            return
        self._configured = True
        self._config_error = None
        self._encoded_at_s = float("-inf")
        self._coordinator.reconfigure(options)
        self._calls.wake()
        await self._admin.apply(options.admin.place)
        direct = options.direct
        place = (direct.host or node_ip(), direct.port) if direct.enabled else None
        await self._direct.apply(place)

    async def report(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take in one ``ReplicaState`` and return the ``Reply``, both in JSON form."""
        self._by_handle += 1
        return self._calls.report(ReplicaState.model_validate(state)).model_dump(mode="json")

    async def report_router(self, report: dict[str, Any]) -> dict[str, Any]:
        """Take in one ``RouterReport`` in JSON form; the answer names requests to look up."""
        self._by_handle += 1
        return self._calls.report_router(RouterReport.model_validate(report))

    async def listen(self, version: int | None, timeout_s: float) -> dict[str, Any] | None:
        """See ``FleetCalls``."""
        self._by_handle += 1
        return await self._calls.listen(version, timeout_s)

    async def direct_access(self) -> dict[str, str] | None:
        """Where the same calls are taken without Serve in between, as an ``Access``.

        Only who may call handles learns the secret. ``None``: nowhere at this time.
        """
        if self._direct.bound is None:
            return None
        host, port = self._direct.bound
        if ip_address(host).is_unspecified:
            host = node_ip()
        url = f"http://{host_and_port(host, port)}"
        return asdict(Access(url, self._direct_calls.secret))

    @status_api.get("/", response_class=HTMLResponse)
    async def page(self) -> HTMLResponse:
        """The live page: one file that asks for the status every second."""
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": PAGE_POLICY})

    @status_api.get("/status")
    async def status(self) -> Response:
        """The fleet for people and scripts; read-only, and up to 0.25 s old."""
        now_s = time.monotonic()
        # No await between look and encoding: all who ask meanwhile get the same bytes.
        if now_s - self._encoded_at_s >= STATUS_AGE_S:
            self._encoded = pydantic_core.to_json(self._status(), inf_nan_mode="null")
            self._encoded_at_s = now_s
        return Response(self._encoded, media_type="application/json")

    def _status(self) -> dict[str, Any]:
        self._coordinator.tick()
        snapshot = self._aggregate.snapshot()
        known = {entry.replica_id for entry in snapshot.entries}
        return {
            "version": snapshot.version,
            "time_s": time.time(),
            "uptime_s": time.monotonic() - self._started_at_s,
            "config": self._options,
            "config_error": self._config_error,
            "listening_routers": self._calls.listeners,
            "reports": {key.value: count for key, count in self._aggregate.verdicts.items()},
            "orders": self._coordinator.orders,
            "pins_of_nobody": sorted(self._options.pins.keys() - known - {FLEET}),
            "admin": {
                "node": socket.gethostname(),
                "address": self._admin.address,
                "fault": self._admin.fault,
            },
            "direct": {
                "address": self._direct.address,
                "fault": self._direct.fault,
                "calls": self._direct_calls.answered,
                "calls_by_handle": self._by_handle,
                "attending": self._calls.attending.total(),
            },
            "leases": self._lease_status(),
            "budget": {
                "fast_token_share": self._coordinator.budget.fast_token_share,
                "allowances": self._coordinator.budget.holders,
            },
            "routers": [
                {**report.model_dump(), "age_s": age_s}
                for age_s, report in self._coordinator.routers.reports()
            ],
            "replicas": snapshot.entries,
        }

    @status_api.get("/explain")
    async def explain(
        self,
        floor: Floor = Floor.ANY,
        session: str | None = None,
        policy: str | None = None,
        application: str | None = None,
        replica: str | None = None,
        request: str | None = None,
    ) -> dict[str, Any]:
        """Why such a request would go where, or why one went where it did; read-only."""
        if request is not None:
            return await self._explanations.did(request, replica=replica)
        ask = Ask(floor=floor, session=session)
        return self._explanations.would(
            ask, application=application, policy=policy, replica=replica
        )

    @property
    def _aggregate(self) -> FleetAggregate:
        return self._coordinator.aggregate

    @property
    def _options(self) -> ControllerOptions:
        return self._coordinator.options

    def _lease_status(self) -> dict[str, Any]:
        book, now_s = self._coordinator.book, time.monotonic()
        return {
            "held": [
                {
                    "replica_id": lease.replica_id,
                    "node_id": lease.node_id,
                    "age_s": now_s - lease.granted_at_s,
                    "expires_in_s": lease.expires_at_s - now_s,
                }
                for lease in book.leases()
            ],
            "refused": {
                name: refusal.value for name, refusal in self._coordinator.refusals.items()
            },
            "granted": book.granted,
            "revoked": book.revoked,
        }


fleet_controller = serve.deployment(
    name=CONTROLLER_DEPLOYMENT,
    num_replicas=1,
    # Every router holds one slot while it listens.
    max_ongoing_requests=10_000,
    ray_actor_options={"num_cpus": 0},
    # A line for each report by the handle would cost more than the report.
    logging_config={"enable_access_log": False},
    health_check_period_s=1,
    health_check_timeout_s=5,
    # A listening router is no reason to put off a shutdown.
    graceful_shutdown_timeout_s=1,
)(serve.ingress(status_api)(FleetController))
"""The deployment, to be bound by an app builder."""
