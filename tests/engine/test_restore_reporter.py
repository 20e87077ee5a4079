"""What a rank reports of its restores."""

import logging
import uuid

import pytest

from dps_ray.commands import RestoreTask
from dps_ray.engine.restore_reporter import RestoreReporter
from dps_ray.engine.status_page import StatusPage
from dps_ray.memory.restore_result import RestoreResult


def test_speed_is_the_latest_restores_and_a_fault_is_logged_once_until_it_has_passed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = StatusPage.create(f"test-{uuid.uuid4().hex[:12]}")
    monkeypatch.setattr(logging.getLogger("vllm.dps"), "propagate", True)
    section = page.rank(0)
    report = RestoreReporter(0, section)
    with caplog.at_level(logging.INFO, "vllm.dps"):
        report(RestoreResult(RestoreTask(2, 2, 1), True, 4096, 0.5))
        report(RestoreResult(RestoreTask(3, 3, 2), False, 4096, 0.5, error="link down"))
        report(RestoreResult(RestoreTask(4, 4, 3), False, 4096, 0.5, error="link still down"))
        report(RestoreResult(RestoreTask(3, 3, 4), True, 4096, 0.25))
        assert section["restore_bytes_per_s"] == 4096 / 0.25
        report(RestoreResult(RestoreTask(4, 4, 5), True, 4096, 0.25))
    page.remove()
    assert section.outcomes[2:5].tolist() == [1, 4, 5]
    assert (section["restored_bytes"], section["restore_busy_s"]) == (3 * 4096, 1.0)
    assert section["restores_failed"] == 2
    assert section.error == "link still down"
    assert caplog.messages == ["dps rank 0: link down", "dps rank 0: restores succeed again"]
