"""The controller's calls, without a cluster around them."""

import asyncio
import json
from typing import Any

import pytest
from dps_deployments import controller as controller_module
from dps_deployments.controller import FleetController

from dps_ray.fleet.orders import FLEET
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.modes import Mode, Pin


async def configured(**user_config: Any) -> FleetController:
    made = FleetController()
    await made.reconfigure(user_config)
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


async def status(controller: FleetController) -> dict[str, Any]:
    return dict(json.loads((await controller.status()).body))


def test_publications_leave_out_the_orders_that_every_replica_carries() -> None:
    async def run() -> dict[str, Any]:
        controller = await configured()
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


def test_status_is_encoded_once_for_all_who_ask_within_a_quarter_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    # On a busy machine half of this test takes longer than an answer is handed out.
    monkeypatch.setattr(controller_module, "STATUS_AGE_S", 60.0)
    encode = FleetController._status

    def counted(controller: FleetController) -> dict[str, Any]:
        made.append(1)
        return encode(controller)

    monkeypatch.setattr(FleetController, "_status", counted)

    async def run() -> None:
        controller = await configured()
        await heard(controller, "a")
        answers = await asyncio.gather(*(controller.status() for _ in range(50)))
        assert len(made) == 1
        assert len({bytes(answer.body) for answer in answers}) == 1
        await heard(controller, "b")
        assert len((await status(controller))["replicas"]) == 1
        monkeypatch.setattr(controller_module, "STATUS_AGE_S", 0.0)
        assert len((await status(controller))["replicas"]) == 2
        assert len(made) == 2
        monkeypatch.setattr(controller_module, "STATUS_AGE_S", 60.0)
        # An operator sees at once what has become of a configuration.
        await controller.reconfigure({"routing": {"name": "wrong"}})
        assert "routing" in (await status(controller))["config_error"]

    asyncio.run(run())


def test_status_names_pins_that_match_no_replica() -> None:
    async def run() -> dict[str, Any]:
        controller = await configured(pins={"a": "full", "nobody": "fast", FLEET: "auto"})
        await heard(controller, "a")
        return await status(controller)

    assert asyncio.run(run())["pins_of_nobody"] == ["nobody"]
