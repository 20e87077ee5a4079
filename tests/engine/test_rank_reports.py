"""What the scheduler makes of the ranks' reports."""

import uuid
from types import SimpleNamespace

from dps_ray.commands import RestoreTask
from dps_ray.engine.rank_reports import RankReports
from dps_ray.engine.status_page import StatusPage


def test_failed_restore_is_reported_with_its_cause_and_rank() -> None:
    page = StatusPage.create(f"test-{uuid.uuid4().hex[:12]}")
    said: list[tuple[int, int, str]] = []
    manager = SimpleNamespace(
        ledger=SimpleNamespace(open_restores=[RestoreTask(3, 3, 7)]),
        on_restore_failed=lambda *report: said.append(report),
    )
    page.rank(0).outcomes[3] = 7
    page.rank(1).error = "segment 3 was not restored into unit 3: copy(4096 bytes): link down"
    page.rank(1).outcomes[3] = -7
    RankReports(page, 2).deliver(manager)  # type: ignore[arg-type]
    page.remove()
    assert said == [
        (
            3,
            7,
            "rank 1, latest failure: segment 3 was not restored into unit 3: copy(4096 bytes): "
            "link down",
        )
    ]
