"""The load policy on weights of every kind, and that full mode is always lossless."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_ray.precision import chunks
from dps_ray.precision.encode import choose, encode
from dps_ray.precision.formats import Format
from dps_ray.precision.misfits import apply_misfits, find_misfits, misfits_of
from dps_ray.precision.nested import decode_fast, decode_full
from dps_ray.precision.report import LoadReport

DTYPES = [torch.float16, torch.bfloat16]


def normal(*shape, scale=0.02, dtype=torch.float16, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def bits(tensor):
    return tensor.view(torch.int16)


def restore(weight, nested):
    out = decode_full(nested)
    apply_misfits(out, find_misfits(weight, out))
    return out


def test_fp16_weight_within_range_is_e4m3_without_a_shift():
    nested, report = choose(normal(16, 64), "layer")
    assert (nested.fmt, nested.row_shift, report.misfits) == (Format.E4M3, None, 0)
    assert report.upper_bytes == report.lower_bytes == 16 * 64


def test_fp16_weight_with_an_outlier_is_shifted_by_row():
    weight = normal(16, 64)
    weight[3, 5] = 6.0
    nested, report = choose(weight, "layer")
    assert (nested.fmt, report.misfits, report.shift_min) == (Format.E4M3_ROW, 0, -2)
    assert torch.equal(bits(decode_full(nested)), bits(weight))


def test_fp16_weight_that_a_shift_would_truncate_is_e5m2():
    weight = normal(16, 64)
    weight[:, 0] = 5000.0
    nested, report = choose(weight, "layer")
    assert (nested.fmt, report.misfits) == (Format.E5M2, 0)


def test_bf16_weight_is_shifted_by_row_even_where_e4m3_would_be_exact():
    weight = normal(16, 64, dtype=torch.bfloat16).clamp(min=0.01)
    nested, report = choose(weight, "layer")
    assert (nested.fmt, report.misfits) == (Format.E4M3_ROW, 0)
    assert choose(weight, "layer", ["e4m3"])[0].fmt is Format.E4M3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_weight_stays_unsplit_and_says_so(bad, dtype):
    weight = normal(4, 8, dtype=dtype)
    weight[1, 2] = bad
    nested, report = choose(weight, "layer")
    assert nested is None
    assert "infinite" in report.reason
    assert report.unsplit_bytes == 64
    json.dumps(report.as_dict(), allow_nan=False)
    with pytest.raises(ValueError, match="leave this layer unsplit"):
        encode(weight, "e4m3")


def test_layer_that_no_allowed_format_fits_stays_unsplit_with_every_reason():
    weight = normal(4, 64, dtype=torch.bfloat16)
    weight[:, 0] = 1e9
    nested, report = choose(weight, "layer")
    assert nested is None
    assert all(fmt.value in report.reason for fmt in Format)


def test_rows_of_zeros_and_subnormals_are_exact():
    tiny = torch.arange(1, 9, dtype=torch.int16).view(torch.float16)
    weight = torch.stack(
        [torch.zeros(8, dtype=torch.float16), tiny, -tiny, -torch.zeros_like(tiny)]
    )
    for fmt in Format:
        assert torch.equal(bits(decode_full(encode(weight, fmt))), bits(weight))


@st.composite
def weights(draw):
    dtype = draw(st.sampled_from(DTYPES))
    experts = draw(st.sampled_from([None, 1, 3]))
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 70))
    shape = (rows, columns) if experts is None else (experts, rows, columns)
    scale = draw(st.sampled_from([1e-7, 1e-4, 0.02, 1.0, 300.0]))
    weight = normal(*shape, scale=scale, dtype=dtype, seed=draw(st.integers(0, 99)))
    flat = weight.view(-1)
    limit = 65_504.0 if dtype == torch.float16 else 3e38
    for value in draw(st.lists(st.floats(-limit, limit), max_size=3)):
        flat[draw(st.integers(0, flat.numel() - 1))] = value
    if draw(st.booleans()):
        weight[..., 0, :] = 0
    return weight


@given(weights())
@settings(max_examples=150, deadline=None)
def test_full_mode_with_misfits_patched_is_lossless_for_any_finite_weight(weight):
    for fmt in Format:
        assert torch.equal(bits(restore(weight, encode(weight, fmt))), bits(weight))
    nested, report = choose(weight, "layer")
    if nested is None:
        assert report.fmt is None
        assert report.unsplit_bytes == 2 * weight.numel()
        return
    misfits = find_misfits(weight, decode_full(nested))
    assert (report.misfits, report.max_abs_error) == (misfits.count, misfits.max_abs_error)
    assert decode_fast(nested).isfinite().all()
    exact = [
        f
        for f in Format
        if report.max_abs <= 1.8 and not misfits_of(weight, encode(weight, f)).count
    ]
    assert not exact or report.misfits == 0


def test_chunking_changes_nothing(monkeypatch):
    weight = normal(5, 30, 24, dtype=torch.bfloat16)
    weight[2, 3, 4:6] = torch.tensor([4000.0, 1e-6])
    whole, report = choose(weight, "layer", ["e4m3_row"])
    misfits = misfits_of(weight, whole)
    assert misfits.count
    monkeypatch.setattr(chunks, "CPU_ELEMENTS", 100)
    cut, cut_report = choose(weight, "layer", ["e4m3_row"])
    assert cut_report == report
    assert torch.equal(cut.upper, whole.upper)
    assert torch.equal(cut.lower, whole.lower)
    assert torch.equal(cut.row_shift, whole.row_shift)
    assert cut.row_shift.shape == (5, 30)
    assert torch.equal(bits(decode_full(cut)), bits(decode_full(whole)))
    assert torch.equal(misfits_of(weight, cut).index, misfits.index)


def test_wrong_dtype_and_shape_are_named():
    with pytest.raises(TypeError, match=r"torch\.float32"):
        choose(torch.zeros(2, 2), "layer")
    with pytest.raises(ValueError, match=r"\(4,\)"):
        choose(torch.zeros(4, dtype=torch.float16), "layer")
    with pytest.raises(ValueError, match="decode into"):
        find_misfits(torch.zeros(2, dtype=torch.float16), torch.zeros(3, dtype=torch.float16))


def test_load_report_adds_up_and_prints_every_layer():
    load = LoadReport()
    outlier = normal(4, 8)
    outlier[0, 0] = 6.0
    broken = torch.full((4, 8), float("nan"), dtype=torch.float16)
    for name, weight in [("q_proj", normal(4, 8)), ("down_proj", outlier), ("lm_head", broken)]:
        load.add(choose(weight, name)[1])
    totals = load.totals()
    assert (totals.layers, totals.split, totals.unsplit) == (3, 2, 1)
    assert (totals.upper_bytes, totals.lower_bytes, totals.unsplit_bytes) == (64, 64, 64)
    assert totals.formats == {"e4m3": 1, "e4m3_row": 1}
    table = load.table()
    assert all(name in table for name in ("q_proj", "down_proj", "lm_head", "unsplit"))
    assert table.count("\n") == 4
    json.dumps(load.as_dict(), allow_nan=False)
