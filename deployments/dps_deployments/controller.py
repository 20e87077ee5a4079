"""The fleet controller as a Serve deployment: reports in, publications and status out.

One replica with soft state in an application of its own, so that redeploying the models does not
touch it. When it dies Serve starts another, which knows the fleet again after one heartbeat;
meanwhile replicas keep serving and routers keep routing on what they know.
"""

import asyncio
import contextlib
import logging
import socket
import time
from pathlib import Path
from typing import Any

import pydantic_core
from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse
from ray import serve

from dps_deployments.admin_calls import AdminCalls, admin_api
from dps_deployments.admin_listener import AdminListener
from dps_deployments.controller_client import CONTROLLER_DEPLOYMENT
from dps_deployments.explanations import Explanations
from dps_ray.config import DpsConfigError
from dps_ray.fleet.aggregate import FleetAggregate
from dps_ray.fleet.ask import Ask
from dps_ray.fleet.coordinator import Coordinator
from dps_ray.fleet.orders import FLEET
from dps_ray.fleet.publication import ControllerOptions, Publication, parse_controller_options
from dps_ray.fleet.snapshot import FreshnessOptions
from dps_ray.fleet.state import ReplicaState
from dps_ray.fleet.tally import RouterReport
from dps_ray.modes import Floor

MAX_WAIT_S = 30.0
STATUS_AGE_S = 0.25
"""An answer to ``GET /status`` is handed out for so long: whoever may ask cannot take the loop that
answers replicas for more than one encoding each."""
NOT_FOR_ROUTERS = {"snapshot": {"entries": {"__all__": {"state": {"orders"}}}}}
"""Left out of publications: every replica carries all orders, and no router reads them."""
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
        self._changed = asyncio.Event()
        self._listeners = 0
        self._explanations = Explanations(self._coordinator)
        self._admin = AdminListener(admin_api(AdminCalls(self._coordinator)))
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
        self._wake_listeners()
        await self._admin.apply(options.admin)

    async def report(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take in one ``ReplicaState`` and return the ``Reply``, both in JSON form."""
        before = self._aggregate.version
        reply = self._coordinator.report(ReplicaState.model_validate(state))
        if self._aggregate.version != before:
            self._wake_listeners()
        return reply.model_dump(mode="json")

    async def report_router(self, report: dict[str, Any]) -> dict[str, Any]:
        """Take in one ``RouterReport`` in JSON form; the answer names requests to look up."""
        taken, wanted = self._explanations.take(RouterReport.model_validate(report))
        self._coordinator.routers.note(taken)
        return {"wanted": wanted}

    async def listen(self, version: int | None, timeout_s: float) -> dict[str, Any] | None:
        """Answer with a ``Publication`` as soon as its version is not ``version``.

        Parameters
        ----------
        version
            What the caller has; ``None`` for nothing.
        timeout_s
            Longest wait, seconds; capped at 30.

        Returns
        -------
        dict or None
            The publication in JSON form; ``None`` when the wait passed without a new one.
        """
        deadline_s = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        self._listeners += 1
        try:
            while True:
                self._coordinator.tick()
                if self._aggregate.version != version:
                    publication = self._publication(version)
                    return publication.model_dump(mode="json", exclude=NOT_FOR_ROUTERS)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                await self._wait_for_change(min(left_s, self._options.ageing.publish_period_s))
        finally:
            self._listeners -= 1

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
            "listening_routers": self._listeners,
            "reports": {key.value: count for key, count in self._aggregate.verdicts.items()},
            "orders": self._coordinator.orders,
            "pins_of_nobody": sorted(self._options.pins.keys() - known - {FLEET}),
            "admin": {
                "node": socket.gethostname(),
                "address": self._admin.address,
                "fault": self._admin.fault,
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

    def _publication(self, since: int | None) -> Publication:
        ageing = self._options.ageing
        return Publication(
            snapshot=self._aggregate.changes_since(since),
            routing=self._options.routing,
            dry_run=self._options.dry_run,
            admission=self._options.admission,
            freshness=FreshnessOptions(
                stale_after_s=ageing.stale_after_s, forget_after_s=ageing.forget_after_s
            ),
        )

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

    def _wake_listeners(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)


fleet_controller = serve.deployment(
    name=CONTROLLER_DEPLOYMENT,
    num_replicas=1,
    # Every router holds one slot while it listens.
    max_ongoing_requests=10_000,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=1,
    health_check_timeout_s=5,
    # A listening router is no reason to put off a shutdown.
    graceful_shutdown_timeout_s=1,
)(serve.ingress(status_api)(FleetController))
"""The deployment, to be bound by an app builder."""
