"""The fleet controller as a Serve deployment: reports in, publications and status out.

One replica with soft state in an application of its own, so that redeploying the models does not
touch it. When it dies Serve starts another, which knows the fleet again after one heartbeat;
meanwhile replicas keep serving and routers keep routing on what they know.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Query
from fastapi.responses import HTMLResponse
from ray import serve

from dps_deployments.admin import require_token
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
from dps_ray.modes import Floor, Pin

MAX_WAIT_S = 30.0
DEFAULT_HOLD_S = 60.0
MAX_HOLD_S = 86400.0
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

    def reconfigure(self, user_config: Any) -> None:
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
            logger.error("keeping the previous configuration: %s", error)
            return
        self._configured = True
        self._config_error = None
        self._coordinator.reconfigure(options)
        self._wake_listeners()

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
    async def status(self) -> dict[str, Any]:
        """The fleet for people and scripts; read-only."""
        self._coordinator.tick()
        snapshot = self._aggregate.snapshot()
        return {
            "version": snapshot.version,
            "time_s": time.time(),
            "uptime_s": time.monotonic() - self._started_at_s,
            "config": self._options.model_dump(mode="json"),
            "config_error": self._config_error,
            "listening_routers": self._listeners,
            "reports": {key.value: count for key, count in self._aggregate.verdicts.items()},
            "orders": self._coordinator.orders.model_dump(mode="json"),
            "leases": self._lease_status(),
            "budget": {
                "fast_token_share": self._coordinator.budget.fast_token_share,
                "allowances": self._coordinator.budget.holders,
            },
            "routers": [
                {**report.model_dump(mode="json"), "age_s": age_s}
                for age_s, report in self._coordinator.routers.reports()
            ],
            "replicas": [entry.model_dump(mode="json") for entry in snapshot.entries],
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

    @status_api.put("/admin/pins/{target}")
    async def pin(
        self, target: str, pin: Pin, authorization: Annotated[str | None, Header()] = None
    ) -> dict[str, Any]:
        """Pin the mode of a replica, or of all others (``*``), above the configuration."""
        require_token(self._options.admin, authorization)
        self._require_orders()
        self._require_known(target, others=[FLEET])
        return self._order(target, pin)

    @status_api.delete("/admin/pins/{target}")
    async def unpin(
        self, target: str, authorization: Annotated[str | None, Header()] = None
    ) -> dict[str, Any]:
        """Take an order back: what the configuration says counts again."""
        require_token(self._options.admin, authorization)
        self._require_orders()
        if target not in self._coordinator.orders.pins:
            raise HTTPException(404, f"there is no order for {target!r}")
        return self._order(target, None)

    @status_api.delete("/admin/leases/{replica_id}")
    async def revoke_lease(
        self,
        replica_id: str,
        hold_s: Annotated[float, Query(ge=0.0, le=MAX_HOLD_S)] = DEFAULT_HOLD_S,
        authorization: Annotated[str | None, Header()] = None,
    ) -> dict[str, Any]:
        """End a replica's restore and give it no lease for ``hold_s``."""
        require_token(self._options.admin, authorization)
        if not self._options.leases.enabled:
            raise HTTPException(
                409, "leases.enabled is false: replicas restore without asking; set it to true"
            )
        if not self._coordinator.book.revoke(replica_id, hold_s):
            held = ", ".join(lease.replica_id for lease in self._coordinator.book.leases())
            raise HTTPException(
                404,
                f"{replica_id!r} holds no lease and restores nothing: the leases of "
                f"{held or 'nobody'} are valid",
            )
        logger.warning("admin call: lease of %s revoked for %.1f s", replica_id, hold_s)
        return {"revoked": replica_id, "hold_s": hold_s}

    def _order(self, target: str, pin: Pin | None) -> dict[str, Any]:
        orders = self._coordinator.orders.pinned(target, pin, int(time.time() * 1000))
        self._coordinator.orders = orders
        logger.warning("admin call: pin of %s is now %s", target, pin and pin.value)
        return orders.model_dump(mode="json")

    def _require_orders(self) -> None:
        left_s = self._coordinator.orders_known_in_s()
        if left_s > 0:
            raise HTTPException(
                503,
                "the controller has just started and is still learning the orders that replicas "
                f"carry: call again in {left_s:.1f} s",
                {"Retry-After": str(math.ceil(left_s))},
            )

    def _require_known(self, target: str, others: Sequence[str] = ()) -> None:
        known = [entry.replica_id for entry in self._aggregate.snapshot().entries]
        if target not in known and target not in others:
            raise HTTPException(
                404,
                f"there is no replica {target!r}: known are {', '.join([*known, *others])}",
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
