"""Traces are read as published, and fitted without losing or reordering a request."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.bench.trace_files import BUNDLED, read_trace
from dps_ray.bench.traces import TraceRequest, fit_context, from_origin, resize, speed_up, window
from dps_ray.config import DpsConfigError

requests = st.lists(
    st.builds(
        TraceRequest,
        arrival_s=st.floats(0, 1e6),
        prompt_tokens=st.integers(1, 100_000),
        output_tokens=st.integers(1, 100_000),
    ),
    min_size=1,
    max_size=30,
)

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:02+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.5,10,20
0.25,30,40
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE_2023, [(0.0, 4808, 10), (0.052, 3180, 8)]),
        (AZURE_2024, [(0.0, 2162, 5), (1.99007, 2399, 6)]),
        (BURSTGPT, [(0.0, 472, 18), (113.0, 417, 276)]),
        (VIDUR, [(0.0, 30, 40), (0.25, 10, 20)]),
    ],
    ids=["azure-2023", "azure-2024", "burstgpt-without-failures", "vidur-out-of-order"],
)
def test_each_published_format_is_recognised_by_its_header(
    text: str, expected: list[tuple[float, int, int]], tmp_path: Path
) -> None:
    trace = read_trace(write(tmp_path, text))
    assert [(each.prompt_tokens, each.output_tokens) for each in trace] == [
        (prompt, output) for _, prompt, output in expected
    ]
    assert [each.arrival_s for each in trace] == pytest.approx(
        [arrival for arrival, _, _ in expected], abs=1e-6
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"line 1: columns are \['a', 'b'\]: needed are azure: TIMESTAMP"),
        (VIDUR + "1.0,ten,5\n", r"line 4, column 'num_prefill_tokens' is 'ten'"),
        (VIDUR + "1.0,10\n", r"line 4, column 'num_decode_tokens' is None"),
        (VIDUR + "-1.0,10,5\n", r"line 4, column 'arrived_at' is '-1.0'"),
        (AZURE_2023 + "yesterday,10,5\n", r"line 4, column 'TIMESTAMP' is 'yesterday'"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n", "holds no request"),
    ],
)
def test_wrong_file_is_refused_naming_line_and_column(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DpsConfigError, match=message):
        read_trace(write(tmp_path, text))


def test_missing_file_names_the_bundled_traces() -> None:
    with pytest.raises(DpsConfigError, match="azure-2023-code-excerpt"):
        read_trace("nowhere.csv")


def test_bundled_excerpt_is_bursty_and_has_a_quiet_gap() -> None:
    trace = read_trace(next(iter(BUNDLED)))
    assert len(trace) == 123
    gaps = sorted(after.arrival_s - before.arrival_s for before, after in pairwise(trace))
    assert gaps[-1] > 60.0
    assert gaps[len(gaps) // 2] < 0.5


@given(requests)
def test_origin_is_the_first_arrival_and_order_is_by_arrival(trace: list[TraceRequest]) -> None:
    moved = from_origin(trace)
    assert moved[0].arrival_s == 0.0
    assert [each.arrival_s for each in moved] == sorted(each.arrival_s for each in moved)
    assert len(moved) == len(trace)


@given(requests, st.floats(0, 1e6), st.floats(0, 1e6))
def test_neighbouring_windows_share_no_request_and_lose_none(
    trace: list[TraceRequest], cut_s: float, end_s: float
) -> None:
    kept = 0
    for start, stop in ((0.0, cut_s), (cut_s, float("inf"))):
        try:
            part = window(trace, start, stop)
        except DpsConfigError:
            continue
        kept += len(part)
        assert all(0 <= each.arrival_s < stop - start for each in part)
    assert kept == len(trace)


def test_empty_window_says_how_long_the_trace_is() -> None:
    with pytest.raises(DpsConfigError, match=r"the trace lasts 3\.0 s"):
        window([TraceRequest(3.0, 1, 1)], 10.0, 20.0)


@given(requests, st.floats(0.01, 100))
def test_speed_changes_arrivals_and_nothing_else(trace: list[TraceRequest], speed: float) -> None:
    faster = speed_up(trace, speed)
    for before, after in zip(trace, faster, strict=True):
        assert after.arrival_s == before.arrival_s / speed
        assert (after.prompt_tokens, after.output_tokens) == (
            before.prompt_tokens,
            before.output_tokens,
        )


@given(requests, st.floats(0.001, 10), st.integers(1, 1000))
def test_resized_lengths_are_positive_and_within_the_limit(
    trace: list[TraceRequest], scale: float, limit: int
) -> None:
    for each in resize(
        trace,
        prompt_scale=scale,
        output_scale=scale,
        max_prompt_tokens=limit,
        max_output_tokens=limit,
    ):
        assert 1 <= each.prompt_tokens <= limit
        assert 1 <= each.output_tokens <= limit


@given(requests, st.integers(2, 5000))
def test_fitted_requests_fit_the_context_and_short_ones_stay(
    trace: list[TraceRequest], context: int
) -> None:
    for before, after in zip(trace, fit_context(trace, context), strict=True):
        assert after.prompt_tokens >= 1
        assert after.output_tokens >= 1
        assert after.prompt_tokens + after.output_tokens <= context
        if before.prompt_tokens + before.output_tokens <= context:
            assert after == before


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(DpsConfigError, match="speed is"):
        speed_up([TraceRequest(0.0, 1, 1)], speed)
