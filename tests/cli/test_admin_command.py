"""``dps-ray admin pin --key``: an engine that belongs to no fleet."""

import uuid

import pytest

from dps_ray.cli.main import main
from dps_ray.engine.status_page import StatusPage
from dps_ray.modes import Pin


def test_engine_without_a_fleet_is_pinned_by_its_key() -> None:
    key = f"test-{uuid.uuid4().hex[:12]}"
    page = StatusPage.create(key)
    assert main(["admin", "pin", "fast", "--key", key]) == 0
    assert page.requested_pin() is Pin.FAST
    assert main(["admin", "pin", "auto", "--key", key]) == 0
    assert page.requested_pin() is Pin.AUTO
    page.remove()


def test_unknown_key_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", "pin", "fast", "--key", "nobody"]) == 2
    said = capsys.readouterr().err
    assert "--key is 'nobody': no engine of this host has it" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"), [("--url", "http://127.0.0.1:8300"), ("--token-file", __file__)]
)
def test_what_only_a_controller_needs_is_refused_beside_a_key(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"test-{uuid.uuid4().hex[:12]}"
    page = StatusPage.create(key)
    assert main(["admin", "pin", "fast", "--key", key, option, value]) == 2
    assert f"{option} is '{value}': --key asks no controller" in capsys.readouterr().err
    assert page.requested_pin() is None
    page.remove()
