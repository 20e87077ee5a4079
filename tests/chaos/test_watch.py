"""Engines are counted at one moment, though their pages are read one after the other."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from dps_ray.chaos.watch import Watch
from dps_ray.engine.status_page import StatusPage
from dps_ray.status import EngineStatus

from ..deployments.statuses import IDLE, RESTORING


@pytest.fixture
def pages() -> Iterator[dict[str, StatusPage]]:
    made = {name: StatusPage.create(f"test-{uuid.uuid4().hex[:12]}") for name in "ab"}
    yield made
    for page in made.values():
        page.remove()


class HandedOver:
    """The second page. Its reader stands still before, until the first restore has ended and this
    one has begun."""

    def __init__(self, first: StatusPage, second: StatusPage) -> None:
        self._first = first
        self._second = second

    def read(self) -> EngineStatus | None:
        self._first.publish(IDLE)
        self._second.publish(RESTORING)
        return self._second.read()

    def permits(self) -> Any:
        return self._second.permits()


def test_restore_that_ends_between_two_pages_is_not_counted_beside_the_next(
    pages: dict[str, StatusPage],
) -> None:
    first, second = pages.values()
    first.publish(RESTORING)
    watch = Watch("", lambda: ())
    watch._pages = {"a": first, "b": HandedOver(first, second)}  # type: ignore[dict-item]
    watch._count()
    assert (watch.restores.most_at_once, watch.restores.most_fast) == (1, 1)


def test_restores_that_overlap_are_counted_together(pages: dict[str, StatusPage]) -> None:
    for page in pages.values():
        page.publish(RESTORING)
    watch = Watch("", lambda: ())
    watch._pages = pages
    watch._count()
    assert (watch.restores.most_at_once, watch.restores.most_fast) == (2, 2)
