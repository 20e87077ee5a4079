"""What a scrape shows of a status page."""

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dps_ray.engine.metrics import COUNTERS, GAUGES, StatusCollector
from dps_ray.engine.status_page import StatusPage

from .test_status_page import a_status


@pytest.fixture
def scraped() -> Iterator[dict[str, float]]:
    key = f"test-{uuid.uuid4().hex[:12]}"
    page = StatusPage.create(key)
    page.publish(replace(a_status(), restore_busy_s=2.5, restore_bytes_per_s=4e9, fault=None))
    families = StatusCollector(key, "0").collect()
    yield {family.samples[0].name: family.samples[0].value for family in families}
    page.remove()


def test_speed_and_time_of_restores_are_exported(scraped: dict[str, float]) -> None:
    assert scraped["dps:restore_bytes_per_s"] == 4e9
    assert scraped["dps:restore_busy_s_total"] == 2.5


def test_every_metric_has_a_name_of_its_own_and_a_value(scraped: dict[str, float]) -> None:
    expected = {f"dps:{name}" for name in GAUGES} | {f"dps:{name}_total" for name in COUNTERS}
    assert set(scraped) == expected | {"dps:mode_fast", "dps:fault"}
    assert scraped["dps:fault"] == 0.0
