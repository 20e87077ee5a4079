"""Rebuilt 16-bit weights equal the reference decoders bit for bit."""

import pytest
import torch
from dps_kernels import Layout, Planes, reconstruct, to_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dps_ray.precision.encode import encode
from dps_ray.precision.nested import NestedTensor
from tests.kernels.weights import DTYPES, FORMATS, bits, nested, planes, values

pytestmark = pytest.mark.usefixtures("path")


def every_pattern(fmt, dtype):
    """All finite FP16 values, then read back as if the checkpoint had been of ``dtype``."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    finite = patterns.view(torch.float16)[(patterns & 0x7FFF) < 0x7C00]
    # Rows of one exponent each for the row format, so that every shift occurs.
    weight = encode(finite.view(2, -1, 1024), fmt)
    return NestedTensor(weight.fmt, weight.upper, weight.lower, weight.row_shift, dtype)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_finite_pattern_equals_the_reference(fmt, dtype, full):
    weight = every_pattern(fmt, dtype)
    out = torch.empty(weight.upper.shape, dtype=dtype)
    reconstruct(out, planes(weight, full))
    assert torch.equal(bits(out), bits(values(weight, full)))


@pytest.mark.parametrize("shift", [-126, -60, -15, 0, 20, 126])
@pytest.mark.parametrize("full", [True, False])
def test_extreme_row_shifts_equal_the_reference(shift, full):
    weight = nested((5, 77), "e4m3_row", torch.bfloat16)
    weight.row_shift.fill_(shift)
    out = torch.empty(5, 77, dtype=torch.bfloat16)
    reconstruct(out, planes(weight, full))
    assert torch.equal(bits(out), bits(values(weight, full)))


@st.composite
def packed_cases(draw):
    rows = draw(st.sampled_from([1, 2, 8, 32]))
    interleave = draw(st.sampled_from([1, 2, 4, 16, 33]))
    shape = (draw(st.integers(1, 3)) * rows, draw(st.integers(1, 5)) * interleave)
    experts = draw(st.sampled_from([None, 1, 4]))
    layout = Layout(rows, interleave, shape[1] % 16 == 0 and draw(st.booleans()))
    return layout, shape if experts is None else (experts, *shape)


@given(
    packed_cases(),
    st.sampled_from(FORMATS),
    st.sampled_from(DTYPES),
    st.booleans(),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_packed_weight_gives_the_packed_values(case, fmt, dtype, full):
    layout, shape = case
    weight = nested(shape, fmt, dtype)
    expected = to_layout(values(weight, full), layout)
    whole = planes(weight, full)
    packed = whole._replace(
        upper=to_layout(whole.upper, layout),
        lower=None if whole.lower is None else to_layout(whole.lower, layout),
        layout=layout,
    )
    out = torch.empty(shape, dtype=dtype)
    reconstruct(out, packed)
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("ids", [[], [2], [3, 0]])
def test_only_the_named_experts_are_written(ids):
    weight = nested((4, 6, 40), "e4m3_row", torch.bfloat16)
    out = torch.full((4, 6, 40), 9.0, dtype=torch.bfloat16)
    reconstruct(out, planes(weight, True), experts=torch.tensor(ids, dtype=torch.int64))
    for expert in range(4):
        expected = values(weight, True)[expert] if expert in ids else torch.full_like(out[0], 9.0)
        assert torch.equal(out[expert], expected)


def test_bad_arguments_are_named_with_their_values():
    weight = planes(nested((4, 8), "e4m3", torch.float16), True)
    out = torch.empty(4, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"out has shape \(4, 7\): \(4, 8\)"):
        reconstruct(out[:, :7], weight)
    with pytest.raises(TypeError, match=r"out is torch\.float32"):
        reconstruct(out.float(), weight)
    with pytest.raises(ValueError, match="fmt is 'int8'"):
        reconstruct(out, weight._replace(fmt="int8"))
    with pytest.raises(ValueError, match="row_shift is missing"):
        reconstruct(out, weight._replace(fmt="e4m3_row"))
    with pytest.raises(ValueError, match="lower has strides"):
        reconstruct(out, weight._replace(lower=weight.lower.T.contiguous().T))
    with pytest.raises(ValueError, match="rows_per_block is 3"):
        reconstruct(out, weight._replace(layout=Layout(3, 2)))
    with pytest.raises(ValueError, match="omit it"):
        reconstruct(out, weight, experts=torch.zeros(1, dtype=torch.int64))
    stacked = Planes(weight.upper[None], None, "e4m3", None)
    with pytest.raises(ValueError, match=r"experts is \[1\]"):
        reconstruct(out[None], stacked, experts=torch.ones(1, dtype=torch.int64))
