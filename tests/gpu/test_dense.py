"""The Triton kernels on the device, on random data, through the public call."""

import pytest
import torch
from dps_kernels import K16, Planes, linear, new_access, prepare_elastic_linear, to_layout
from dps_kernels.hopper import activations, arch, dense, tiles
from dps_kernels.planes import from_layout

from tests.kernels.weights import DTYPES, FORMATS, nested, normal, values

EPSILON = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHAPES = [(4096, 4096), (1536, 2048), (777, 1040)]
TOKENS = [1, 7, 16, 33, 64, 200, 1000]


def on_device(weight, full):
    upper, lower = (to_layout(plane, K16).cuda() for plane in (weight.upper, weight.lower))
    shift = None if weight.row_shift is None else weight.row_shift.cuda()
    return Planes(upper, lower if full else None, weight.fmt.value, shift, K16)


def float64(x, weight, bias):
    return x.double() @ weight.cuda().double().T + bias.double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_full_mode_is_as_near_to_float64_as_the_stock_gemm(fmt, dtype, shape):
    weight = nested(shape, fmt, dtype)
    planes, bias = on_device(weight, True), normal(shape[0], dtype=dtype).cuda()
    for tokens in TOKENS:
        x = normal(tokens, shape[1], dtype=dtype, seed=tokens).cuda()
        exact = float64(x, values(weight, True), bias)
        allowed = EPSILON[dtype] * exact.abs() + 1e-4 * shape[1] ** 0.5
        assert ((linear(x, planes, bias).double() - exact).abs() <= allowed).all()
        stock = torch.nn.functional.linear(x, values(weight, True).cuda(), bias)
        ours, theirs = (
            (y.double() - exact).norm() / exact.norm() for y in (linear(x, planes, bias), stock)
        )
        assert ours <= 1.1 * theirs + 1e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_fast_mode_multiplies_by_the_nested_fp8_weight(fmt, dtype, shape):
    weight = nested(shape, fmt, dtype)
    planes, bias = on_device(weight, False), normal(shape[0], dtype=dtype).cuda()
    here = arch.of_device(planes.upper.device)
    for tokens in TOKENS:
        x = normal(tokens, shape[1], dtype=dtype, seed=tokens).cuda()
        exact = float64(x, values(weight, False), bias)
        error = (linear(x, planes, bias).double() - exact).norm() / exact.norm()
        quantised = tiles.kind_of(False, tokens, here) == "fp8"
        assert error < (0.04 if quantised else 2 * EPSILON[dtype])


def test_compiled_operator_runs_the_mode_that_the_access_allows():
    planes = on_device(nested(SHAPES[0], "e4m3", torch.bfloat16), True)
    access = new_access("cuda")
    layer = prepare_elastic_linear(planes, torch.bfloat16, access)
    operator = torch.compile(torch.ops.dps_kernels.elastic_linear, fullgraph=True)
    x = normal(7, SHAPES[0][1], dtype=torch.bfloat16).cuda()
    for access.all in (True, False, True):
        allowed = planes if access.all else planes._replace(lower=None)
        y = operator(x, planes.lower, None)
        assert torch.equal(y, layer(x, None))
        assert torch.equal(y, linear(x, allowed))


def test_fp8_sums_keep_their_precision_over_a_long_k():
    """Rounding the activations costs 2 to 3%; sums kept in few bits would add to it with K."""
    here = arch.of_device(torch.device("cuda", torch.cuda.current_device()))
    if not here.fp8:
        pytest.skip("no FP8 tensor cores")
    weight = nested((256, 16384), "e4m3", torch.float16)
    planes = on_device(weight, False)
    x = normal(256, 16384, dtype=torch.float16).abs().cuda()
    codes, scale = activations.to_fp8(x)
    quantised = from_layout(codes.float(), K16) * scale[:, None]
    exact = quantised.double() @ values(weight, False).cuda().double().T
    out = torch.empty(256, 256, dtype=torch.float16, device="cuda")
    tile = tiles.choose("fp8", 256, 256, 16384, here)
    dense.multiply(x, planes, None, out, "fp8", tile._replace(splits=1), here)
    terms = quantised.double().abs() @ values(weight, False).cuda().double().abs().T
    assert ((out.double() - exact).abs() <= 2**-10 * exact.abs() + 2**-12 * terms).all()


@pytest.mark.parametrize("full", [True, False])
def test_a_captured_graph_replays_on_new_values(full):
    weight = nested((1536, 2048), "e4m3_row", torch.bfloat16)
    planes = on_device(weight, full)
    x = normal(100, 2048, dtype=torch.bfloat16).cuda()
    linear(x, planes)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, planes)
    x.copy_(normal(100, 2048, dtype=torch.bfloat16, seed=9).cuda())
    graph.replay()
    assert torch.equal(y, linear(x, planes))
