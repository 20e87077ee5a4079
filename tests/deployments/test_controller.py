"""The controller's calls, without a cluster around them."""

import asyncio
from typing import Any

import pytest
from dps_deployments.controller import FleetController
from fastapi import HTTPException

from dps_ray.fleet.orders import FLEET
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.modes import Mode, Pin

TOKEN = "a-token-of-some-length"
BEARER = f"Bearer {TOKEN}"


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> FleetController:
    monkeypatch.setenv("SOME_TOKEN", TOKEN)
    return configured()


def configured(**user_config: Any) -> FleetController:
    made = FleetController()
    made.reconfigure({"admin": {"token_env": "SOME_TOKEN"}, **user_config})
    return made


async def heard(controller: FleetController, replica_id: str, **changes: Any) -> dict[str, Any]:
    state = ReplicaState(
        replica_id=replica_id,
        sequence=1,
        sent_at_s=0.0,
        source=Source.ENGINE,
        code_version="test",
        health=Health.READY,
        mode=Mode.FULL,
    ).model_copy(update=changes)
    return await controller.report(state.model_dump(mode="json"))


def test_new_controller_takes_no_pin_before_it_knows_the_orders_that_replicas_carry(
    controller: FleetController,
) -> None:
    for call in (controller.pin(FLEET, Pin.FAST, BEARER), controller.unpin(FLEET, BEARER)):
        with pytest.raises(HTTPException) as raised:
            asyncio.run(call)
        assert raised.value.status_code == 503
        assert 1 <= int((raised.value.headers or {})["Retry-After"]) <= 4
    learned = configured(ageing={"stale_after_s": 1e-6})
    assert asyncio.run(learned.pin(FLEET, Pin.FAST, BEARER))["pins"] == {FLEET: "fast"}


def test_revoking_is_refused_where_replicas_ask_for_no_leases(controller: FleetController) -> None:
    off = configured(leases={"enabled": False})
    with pytest.raises(HTTPException) as raised:
        asyncio.run(off.revoke_lease("a", 1.0, BEARER))
    assert raised.value.status_code == 409
    assert "leases.enabled is false" in raised.value.detail


def test_publications_leave_out_the_orders_that_every_replica_carries() -> None:
    controller = configured()

    async def run() -> dict[str, Any]:
        controller._coordinator.orders = controller._coordinator.orders.pinned("a", Pin.FULL, 7)
        reply = await heard(controller, "a", orders=controller._coordinator.orders)
        assert reply["orders"]["pins"] == {"a": "full"}
        published = await controller.listen(None, 1.0)
        assert published is not None
        return published

    published = asyncio.run(run())
    (entry,) = published["snapshot"]["entries"]
    assert "orders" not in entry["state"]
    (read,) = Publication.model_validate(published).snapshot.entries
    assert read.state is not None
    assert read.state.mode is Mode.FULL
