"""What callers of the controller say."""

import pytest
from dps_deployments import controller_client


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
