"""Fused decoding and multiplication against float64."""

import pytest
import torch
from dps_kernels import linear, linear_16bit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.weights import DTYPES, FORMATS, nested, normal, planes, values

pytestmark = pytest.mark.usefixtures("path")

FLOATS = [torch.float32, *DTYPES]
ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SHAPES = [(1, 1), (3, 31), (7, 32), (8, 33), (13, 96), (37, 75), (130, 64)]


def assert_close(y, x, weight, bias=None):
    """One rounding of the result and float32's error in the sum of magnitudes."""
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact = exact + bias.double()
    error = (y.double() - exact).abs()
    assert (error <= 2.0**-19 * magnitude + ROUNDING[y.dtype] * exact.abs() + 1e-7).all()


@given(
    st.sampled_from(SHAPES),
    st.sampled_from(FORMATS),
    st.sampled_from(DTYPES),
    st.sampled_from(FLOATS),
    st.integers(1, 19),
    st.booleans(),
    st.booleans(),
)
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_product_equals_float64_of_the_decoded_weight(
    shape, fmt, dtype, x_dtype, tokens, full, biased
):
    weight = nested(shape, fmt, dtype)
    x = normal(tokens, shape[1], dtype=x_dtype, seed=1)
    bias = normal(shape[0], dtype=x_dtype, seed=2) if biased else None
    y = linear(x, planes(weight, full), bias)
    assert y.dtype == x_dtype
    assert_close(y, x, values(weight, full), bias)


@pytest.mark.parametrize("columns", [4096, 8200])
def test_wide_rows_and_many_tokens(columns):
    weight = nested((50, columns), "e4m3_row", torch.bfloat16)
    x = normal(70, columns, dtype=torch.bfloat16, seed=1)
    assert_close(linear(x, planes(weight, True)), x, values(weight, True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 4, 5, 18])
def test_ordinary_16bit_weight(tokens, dtype):
    weight, bias = normal(45, 70, dtype=dtype, scale=0.05), normal(45, dtype=dtype)
    x = normal(tokens, 70, dtype=dtype, seed=1)
    assert_close(linear_16bit(x, weight, bias), x, weight, bias)


def test_leading_dimensions_and_strided_activations_are_kept():
    weight = nested((20, 40), "e4m3", torch.float16)
    x = normal(3, 40, 5, dtype=torch.float16).transpose(1, 2)
    y = linear(x, planes(weight, True))
    assert y.shape == (3, 5, 20)
    assert_close(y.view(-1, 20), x.reshape(-1, 40), values(weight, True))


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40)])
def test_no_tokens_give_no_rows(shape):
    weight = planes(nested((20, 40), "e4m3", torch.float16), True)
    assert linear(torch.empty(shape), weight).shape == (*shape[:-1], 20)


def test_nan_activations_stay_nan():
    weight = planes(nested((20, 40), "e4m3", torch.float16), True)
    x = torch.full((2, 40), float("nan"), dtype=torch.bfloat16)
    assert linear(x, weight).isnan().all()


def test_bad_arguments_are_named_with_their_values():
    weight = planes(nested((4, 8), "e4m3", torch.float16), True)
    with pytest.raises(ValueError, match=r"x has shape \(2, 9\)"):
        linear(torch.empty(2, 9), weight)
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        linear(torch.empty(2, 8, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match=r"bias has shape \(8,\): \(4,\)"):
        linear(torch.empty(2, 8), weight, torch.empty(8))
    with pytest.raises(TypeError, match=r"weight is torch\.float32"):
        linear_16bit(torch.empty(2, 8), torch.empty(4, 8))
    with pytest.raises(ValueError, match="filled"):
        linear(torch.empty(2, 8), weight._replace(upper=weight.upper[None]))
