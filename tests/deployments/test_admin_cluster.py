"""Orders to a running fleet through HTTP: who may give them, and what they do."""

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from dps_ray.cli.admin import TOKEN_VARIABLE
from dps_ray.cli.main import main

from .cluster import ADMIN_PORT, ADMIN_TOKEN
from .fleet import Fleet, kill_controller, until
from .statuses import IDLE, RESTORING

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.usefixtures("calm")]

HOLD_S = 2.0
RIGHT = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
URL = f"http://127.0.0.1:{ADMIN_PORT}"


@pytest.fixture(autouse=True)
def orders(fleet: Fleet) -> Iterator[None]:
    """The controller takes orders for the length of a test."""
    fleet.cluster.configure({"admin": {"token_env": TOKEN_VARIABLE, "port": ADMIN_PORT}})
    until(lambda: fleet.cluster.status()["admin"]["address"] == f"127.0.0.1:{ADMIN_PORT}")
    yield
    fleet.cluster.configure({})


def admin(*words: str) -> int:
    return main(["admin", *words, "--url", URL])


def heard_pin(fleet: Fleet, replica_id: str) -> str | None:
    """The order for a replica as that replica itself reports it."""
    pin: str | None = fleet.entry(replica_id)["state"]["orders"]["pins"].get(replica_id)
    return pin


def lease_holders(fleet: Fleet) -> list[str]:
    return [lease["replica_id"] for lease in fleet.cluster.status()["leases"]["held"]]


def test_calls_without_the_token_change_nothing_and_status_stays_open(fleet: Fleet) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong-token-of-some-length"}):
        for method, path in [("PUT", "pins/*?pin=fast"), ("DELETE", "leases/x")]:
            url = f"{URL}/admin/{path}"
            answer = httpx.request(method, url, headers=headers, timeout=60.0)
            assert answer.status_code == 401
    assert fleet.cluster.status()["orders"]["pins"] == {}
    assert ADMIN_TOKEN not in json.dumps(fleet.cluster.status())


def test_public_route_leads_to_no_order_and_without_a_token_nothing_does(fleet: Fleet) -> None:
    for base in (fleet.cluster.url, f"{fleet.cluster.url}/dps"):
        for method, path in [("PUT", "pins/*?pin=fast"), ("DELETE", "leases/x")]:
            answer = httpx.request(method, f"{base}/admin/{path}", headers=RIGHT, timeout=60.0)
            assert answer.status_code == 404
    for path in ("", "status", "dps/status", "openapi.json"):
        assert httpx.get(f"{URL}/{path}", headers=RIGHT, timeout=60.0).status_code == 404
    fleet.cluster.configure({})
    until(lambda: fleet.cluster.status()["admin"]["address"] is None)
    with pytest.raises(httpx.ConnectError):
        httpx.put(f"{URL}/admin/pins/*?pin=fast", headers=RIGHT)


def test_pin_reaches_a_replica_outlives_the_controller_and_is_taken_back(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, other = fleet.pages
    # A controller that has just started takes no pin yet.
    until(lambda: admin("pin", "full", "--replica", victim) == 0)
    until(lambda: heard_pin(fleet, victim) == "full")
    assert heard_pin(fleet, other) is None
    kill_controller()
    until(fleet.is_back, timeout_s=120.0)
    until(lambda: fleet.cluster.status()["orders"]["pins"] == {victim: "full"})
    until(lambda: admin("unpin", "--replica", victim) == 0)
    until(lambda: heard_pin(fleet, victim) is None)
    capsys.readouterr()
    assert admin("pin", "full", "--replica", "nobody") == 2
    assert "there is no replica 'nobody': known are" in capsys.readouterr().err


def test_revoked_lease_stops_the_restore_that_runs(fleet: Fleet) -> None:
    victim, _ = fleet.pages
    fleet.set(victim, RESTORING)
    until(lambda: lease_holders(fleet) == [victim], timeout_s=60.0)
    assert not fleet.pages[victim].permits().stop
    assert admin("revoke", "--replica", victim, "--hold-s", "500") == 0
    until(lambda: fleet.pages[victim].permits().stop)
    assert lease_holders(fleet) == []
    assert fleet.cluster.status()["leases"]["refused"] == {victim: "revoked"}
    # Its engine, which is played, restores on, and so it can be held anew.
    revoked_s = time.monotonic()
    assert admin("revoke", "--replica", victim, "--hold-s", str(HOLD_S)) == 0
    until(lambda: lease_holders(fleet) == [victim])
    assert time.monotonic() - revoked_s >= HOLD_S
    until(lambda: not fleet.pages[victim].permits().stop)
    fleet.set(victim, IDLE)
    assert admin("revoke", "--replica", victim) == 2


def test_token_that_is_missing_or_refused_is_named(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "another-token-of-some-length")
    assert admin("pin", "fast", "--fleet") == 2
    assert "refused with 401" in capsys.readouterr().err
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert admin("pin", "fast", "--fleet") == 2
    assert f"{TOKEN_VARIABLE} is not set" in capsys.readouterr().err
    monkeypatch.setenv(TOKEN_VARIABLE, ADMIN_TOKEN)
    assert main(["admin", "pin", "fast", "--fleet", "--url", "http://127.0.0.1:9"]) == 2
    assert "no controller takes orders there" in capsys.readouterr().err
