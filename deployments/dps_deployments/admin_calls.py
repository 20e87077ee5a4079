"""What an operator can order by a call: mode pins, and the end of a restore."""

import logging
import math
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Query

from dps_deployments.admin import require_token
from dps_ray.fleet.coordinator import Coordinator
from dps_ray.fleet.orders import FLEET
from dps_ray.modes import Pin

DEFAULT_HOLD_S = 60.0
MAX_HOLD_S = 86400.0

Authorization = Annotated[str | None, Header()]

logger = logging.getLogger("ray.serve")


class AdminCalls:
    """The calls, each with the token it must bring.

    Parameters
    ----------
    coordinator
        Takes the orders.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def pin(
        self, target: str, pin: Pin, authorization: Authorization = None
    ) -> dict[str, Any]:
        """Pin the mode of a replica, or of all others (``*``), above the configuration."""
        self._admit(authorization)
        self._require_orders()
        self._require_known(target, others=[FLEET])
        return self._order(target, pin)

    async def unpin(self, target: str, authorization: Authorization = None) -> dict[str, Any]:
        """Take an order back: what the configuration says counts again."""
        self._admit(authorization)
        self._require_orders()
        if target not in self._coordinator.orders.pins:
            raise HTTPException(404, f"there is no order for {target!r}")
        return self._order(target, None)

    async def revoke_lease(
        self,
        replica_id: str,
        hold_s: Annotated[float, Query(ge=0.0, le=MAX_HOLD_S)] = DEFAULT_HOLD_S,
        authorization: Authorization = None,
    ) -> dict[str, Any]:
        """End a replica's restore and give it no lease for ``hold_s``."""
        self._admit(authorization)
        if not self._coordinator.options.leases.enabled:
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

    def _admit(self, authorization: str | None) -> None:
        require_token(self._coordinator.options.admin, authorization)

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
        entries = self._coordinator.aggregate.snapshot().entries
        known = [entry.replica_id for entry in entries]
        if target not in known and target not in others:
            raise HTTPException(
                404,
                f"there is no replica {target!r}: known are {', '.join([*known, *others])}",
            )


def admin_api(calls: AdminCalls) -> FastAPI:
    """The calls as an ASGI application, to be run in the controller's event loop."""
    api = FastAPI(title="DPS fleet orders", docs_url=None, redoc_url=None, openapi_url=None)
    api.put("/admin/pins/{target}")(calls.pin)
    api.delete("/admin/pins/{target}")(calls.unpin)
    api.delete("/admin/leases/{replica_id}")(calls.revoke_lease)
    return api
