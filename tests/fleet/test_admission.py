"""When a request that was turned away should come back."""

import pytest

from dps_ray.fleet.admission import AdmissionOptions, DrainRate, retry_after_s

OPTIONS = AdmissionOptions()


def test_drain_rate_is_that_of_the_recent_past() -> None:
    drain = DrainRate(window_s=10.0)
    assert drain.per_s(0.0) is None
    for number in range(100):
        drain.note(number * 0.1)
    assert drain.per_s(10.0) == pytest.approx(10.0, rel=0.05)
    assert drain.per_s(15.0) == pytest.approx(5.0, rel=0.05)
    assert drain.per_s(30.0) is None


def test_young_rate_is_not_exaggerated() -> None:
    drain = DrainRate()
    drain.note(5.0)
    drain.note(5.01)
    assert drain.per_s(5.02) == 2.0


@pytest.mark.parametrize(
    ("queued", "drain_per_s", "expected_s"),
    [(49, 5.0, 10.0), (0, 50.0, 2.0), (10**6, 1.0, 60.0), (5, None, 2.0), (11, 5.0, 3.0)],
)
def test_retry_after_is_the_queue_over_the_drain_rate_within_bounds(
    queued: int, drain_per_s: float | None, expected_s: float
) -> None:
    assert retry_after_s(OPTIONS, queued, drain_per_s) == expected_s
