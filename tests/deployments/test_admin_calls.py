"""The operator's calls, without a listener around them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from dps_deployments.admin_calls import AdminCalls
from fastapi import HTTPException

from dps_ray.fleet.coordinator import Coordinator
from dps_ray.fleet.orders import FLEET
from dps_ray.fleet.publication import parse_controller_options
from dps_ray.fleet.snapshot import FreshnessOptions
from dps_ray.modes import Pin

TOKEN = "a-token-of-some-length"
BEARER = f"Bearer {TOKEN}"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", TOKEN)


def configured(clock: Callable[[], float] = lambda: 0.0, **user_config: Any) -> AdminCalls:
    options = parse_controller_options({"admin": {"token_env": "SOME_TOKEN"}, **user_config})
    return AdminCalls(Coordinator(options, clock))


def test_new_controller_takes_no_pin_before_it_knows_the_orders_that_replicas_carry() -> None:
    now_s = 0.0
    new = configured(lambda: now_s)
    for call in (new.pin(FLEET, Pin.FAST, BEARER), new.unpin(FLEET, BEARER)):
        with pytest.raises(HTTPException) as raised:
            asyncio.run(call)
        assert raised.value.status_code == 503
        assert raised.value.headers == {"Retry-After": "4"}
    now_s = FreshnessOptions().stale_after_s
    assert asyncio.run(new.pin(FLEET, Pin.FAST, BEARER))["pins"] == {FLEET: "fast"}


def test_revoking_is_refused_where_replicas_ask_for_no_leases() -> None:
    off = configured(leases={"enabled": False})
    with pytest.raises(HTTPException) as raised:
        asyncio.run(off.revoke_lease("a", 1.0, BEARER))
    assert raised.value.status_code == 409
    assert "leases.enabled is false" in raised.value.detail


def test_every_call_needs_the_token() -> None:
    calls = configured()
    for call in (
        calls.pin(FLEET, Pin.FAST),
        calls.unpin(FLEET, "Bearer wrong"),
        calls.revoke_lease("a", 1.0, None),
    ):
        with pytest.raises(HTTPException) as raised:
            asyncio.run(call)
        assert raised.value.status_code == 401
