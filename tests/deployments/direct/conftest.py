"""What callers of the controller say."""

import pytest
from dps_deployments import controller_client, direct_client

PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds makes no controller slow or unreachable."""
    monkeypatch.setattr(controller_client, "CALL_TIMEOUT_S", PATIENCE_S)
    patient = {**direct_client.TIMEOUTS, "connect": PATIENCE_S}
    monkeypatch.setattr(direct_client, "TIMEOUTS", patient)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What callers write to their logs."""
    lines: list[str] = []

    def note(text: str, *args: object) -> None:
        # The port writes to the same log.
        if text.startswith("%s: fleet controller"):
            lines.append(text % args)

    for level in ("info", "warning"):
        monkeypatch.setattr(controller_client.logger, level, note)
    return lines
