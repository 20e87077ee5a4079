"""Who may give orders: nobody without a token, and nobody with a wrong one."""

from pathlib import Path

import pytest
from dps_deployments.admin import require_token
from fastapi import HTTPException

from dps_ray.config import DpsConfigError
from dps_ray.fleet.publication import AdminOptions, parse_controller_options

TOKEN = "a-token-of-some-length"


@pytest.fixture
def options(tmp_path: Path) -> AdminOptions:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return AdminOptions(token_file=str(file))


@pytest.mark.parametrize("authorization", [f"Bearer {TOKEN}", f"bearer {TOKEN} "])
def test_right_token_passes(options: AdminOptions, authorization: str) -> None:
    require_token(options, authorization)


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xfc"],
)
def test_any_other_is_refused(options: AdminOptions, authorization: str | None) -> None:
    with pytest.raises(HTTPException) as raised:
        require_token(options, authorization)
    assert raised.value.status_code == 401


def test_token_in_the_environment_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    options = AdminOptions(token_env="SOME_TOKEN")
    monkeypatch.setenv("SOME_TOKEN", TOKEN)
    require_token(options, f"Bearer {TOKEN}")
    monkeypatch.setenv("SOME_TOKEN", f"{TOKEN}-2")
    with pytest.raises(HTTPException):
        require_token(options, f"Bearer {TOKEN}")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (AdminOptions(), "set admin.token_env or admin.token_file"),
        (AdminOptions(token_env="NOT_SET_ANYWHERE"), "has 0 characters"),
        (AdminOptions(token_file="/no/such/file"), "cannot be read"),
    ],
)
def test_without_a_usable_token_every_call_is_refused(options: AdminOptions, why: str) -> None:
    for authorization in (None, "Bearer ", "Bearer x"):
        with pytest.raises(HTTPException) as raised:
            require_token(options, authorization)
        assert raised.value.status_code == 403
        assert why in raised.value.detail


def test_two_places_for_one_token_are_a_fault() -> None:
    with pytest.raises(DpsConfigError, match="token_env and token_file are both given"):
        parse_controller_options({"admin": {"token_env": "A", "token_file": "b"}})


@pytest.mark.parametrize("host", ["", "localhost", "no-such-host.invalid", "a..b", "10.0.0.256"])
def test_name_in_the_place_of_an_address_is_a_fault(host: str) -> None:
    """To look it up would hold up all that the controller does."""
    with pytest.raises(DpsConfigError) as raised:
        parse_controller_options({"admin": {"host": host}})
    assert f"user_config.admin.host is {host!r}" in str(raised.value)
    assert "give an IP address: 127.0.0.1" in str(raised.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::1", "fe80::1%eth0"])
def test_address_of_either_family_is_taken(host: str) -> None:
    assert parse_controller_options({"admin": {"host": host}}).admin.host == host


def test_one_port_for_orders_and_for_the_fleets_calls_is_a_fault() -> None:
    same = {"admin": {"port": 8301, "token_env": "TOKEN"}, "direct": {"port": 8301}}
    with pytest.raises(DpsConfigError, match=r"direct\.port and admin\.port are both 8301"):
        parse_controller_options(same)
    parse_controller_options({**same, "direct": {"port": 8301, "enabled": False}})
    parse_controller_options({**same, "admin": {"port": 8301}})
    with pytest.raises(DpsConfigError, match=r"user_config\.direct\.host is 'head'"):
        parse_controller_options({"direct": {"host": "head"}})
