"""Latency figures and SLO attainment follow their definitions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.bench.report import summarise, table
from dps_ray.bench.slo import SloTarget, evaluate, percentiles
from dps_ray.config import DpsConfigError

TARGET = SloTarget(ttft_ms=2000.0, t_base_ms=100.0, tbt_factor=5.0)


def answered(
    *times_s: float, index: int = 0, scheduled_s: float = 0.0, sent_s: float = 0.0
) -> RequestRecord:
    return RequestRecord(
        index=index,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        requested_output_tokens=len(times_s),
        outcome=Outcome.OK,
        chunk_times_s=list(times_s),
        end_s=times_s[-1],
        prompt_tokens=10,
        output_tokens=len(times_s),
    )


def failed(outcome: Outcome = Outcome.FAILED, reason: str = "broken") -> RequestRecord:
    return RequestRecord(1, 0.0, 0.0, 5, outcome=outcome, reason=reason, end_s=1.0)


def test_latencies_count_from_the_scheduled_arrival_not_from_the_sending() -> None:
    record = answered(3.0, 3.2, 3.6, scheduled_s=1.0, sent_s=2.5)
    assert record.ttft_s == pytest.approx(2.0)
    assert record.e2e_s == pytest.approx(2.6)
    assert record.itl_s == pytest.approx([0.2, 0.4])
    assert record.tpot_s == pytest.approx(0.3)


def test_tpot_divides_by_tokens_where_one_piece_holds_several() -> None:
    record = answered(1.0, 2.0)
    record.output_tokens = 11
    assert record.tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize("record", [answered(1.0), failed()])
def test_tpot_is_unknown_below_two_tokens(record: RequestRecord) -> None:
    assert record.tpot_s is None


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (answered(2.0, 2.5), True),
        (answered(2.001, 2.1), False),
        (answered(1.0, 1.501), False),
        (answered(1.0), True),
        (failed(), False),
    ],
    ids=["at both limits", "late first token", "one long gap", "single token", "failed"],
)
def test_objective_needs_the_first_token_in_time_and_no_long_gap(
    record: RequestRecord, expected: bool
) -> None:
    assert TARGET.attained(record) is expected


def test_failures_and_rejections_count_as_misses() -> None:
    records = [answered(1.0, 1.1), failed(), failed(Outcome.REJECTED), answered(1.0, 9.0)]
    result = evaluate(records, TARGET, duration_s=10.0)
    assert result.attainment == 0.25
    assert result.ttft_attainment == 0.5
    assert result.tbt_attainment == 0.25
    assert result.goodput_rps == 0.1


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_in_milliseconds(values_s: list[float]) -> None:
    found = percentiles(values_s)
    assert found is not None
    assert found.p50_ms <= found.p95_ms <= found.p99_ms <= found.max_ms
    assert found.max_ms == pytest.approx(max(values_s) * 1000)
    assert found.count == len(values_s)


def test_no_value_gives_no_percentile() -> None:
    assert percentiles([None, None]) is None


@pytest.mark.parametrize("field", ["ttft_ms", "t_base_ms", "tbt_factor"])
def test_impossible_objective_is_refused(field: str) -> None:
    with pytest.raises(DpsConfigError, match=f"SLO {field} is 0"):
        SloTarget(**{field: 0.0})


def test_summary_counts_outcomes_and_survives_json() -> None:
    records = [answered(1.0, 1.1, 1.2), failed(), failed(Outcome.REJECTED, "HTTP 503: full")]
    summary = json.loads(json.dumps(summarise(records, TARGET)))
    assert summary["requests"] == {"sent": 3, "ok": 1, "failed": 1, "rejected": 1}
    assert summary["reasons"] == {"broken": 1, "HTTP 503: full": 1}
    assert summary["output_tokens"] == 3
    assert summary["slo"]["attainment"] == pytest.approx(1 / 3)
    assert summary["latency"]["max_tbt"]["max_ms"] == pytest.approx(100.0)
    text = table(summary)
    assert "3 sent, 1 ok, 1 failed, 1 rejected" in text
    assert "HTTP 503: full" in text


def test_table_shows_a_dash_where_nothing_was_measured() -> None:
    text = table(summarise([failed()], TARGET))
    assert text.count("-") >= 20
