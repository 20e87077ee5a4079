"""Routed experts in the interpreter, their inline assembly included, against float64."""

import pytest
import torch
from dps_kernels.hopper import moe
from dps_kernels.hopper.arch import Arch
from dps_kernels.hopper.routing import sort_routes
from dps_kernels.hopper.tiles import Tile
from dps_kernels.planes import K16, to_layout

from dps_ray.precision.nested import NestedTensor
from tests.kernels.hopper.interpreter import interpreted
from tests.kernels.weights import DTYPES, FORMATS, nested, normal, planes, values

# The interpreter's sigmoid passes through exp(-x) = inf, and gets 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

HOPPER = Arch(90, 132, 233472)
TILE = Tile(bm=16, bn=32, bk=32, warps=4, stages=2)
EXPERTS, HIDDEN, INNER = 5, 80, 48
"""Tiles do not divide H or I, and no tile divides the routes of an expert."""


def layer(fmt, dtype):
    w13 = nested((EXPERTS, 2 * INNER, HIDDEN), fmt, dtype, seed=3)
    return w13, nested((EXPERTS, HIDDEN, INNER), fmt, dtype, seed=4)


def stored(weight: NestedTensor, full: bool):
    """Planes in the order of the GPU's kernels."""
    part = planes(weight, full)
    lower = None if part.lower is None else to_layout(part.lower, K16)
    return part._replace(upper=to_layout(part.upper, K16), lower=lower, layout=K16)


def route(tokens, top_k=2, experts=EXPERTS):
    scores = normal(tokens, experts, seed=5).softmax(dim=-1)
    weights, ids = scores.topk(top_k, dim=-1)
    return weights, ids


def run(x, w13, w2, weights, ids, kind, tile=TILE, arch=HOPPER):
    full = kind == "full"
    with interpreted():
        plan = moe.Plan(kind, tile)
        return moe.routed(x, stored(w13, full), stored(w2, full), weights, ids, plan, arch)


def exact(x, w13, w2, weights, ids, quantise=lambda rows: rows):
    """Float64, but for ``quantise``, which the tensor cores' operands go through."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        row = quantise(x[token].double())
        for weight, expert in zip(weights[token].double(), ids[token], strict=True):
            gate, up = (w13[expert].double() @ row).chunk(2)
            inner = quantise((torch.nn.functional.silu(gate) * up).to(x.dtype).double())
            out[token] += weight * (w2[expert].double() @ inner)
    return out


def fp8(row):
    """Per-token dynamic scale, as vLLM's FP8 layers have it."""
    scale = row.abs().max() / 448
    return (row / scale).float().to(torch.float8_e4m3fn).double() * scale


def assert_close(y, expected, dtype, slack=1.0):
    """Roundings of the routes' 16-bit results and of their sum."""
    assert y.dtype == dtype
    epsilon = 2.0**-11 if dtype == torch.float16 else 2.0**-9
    bound = slack * epsilon * (2 * expected.abs() + expected.abs().max())
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["full", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_equal_float64(fmt, dtype, kind):
    w13, w2 = layer(fmt, dtype)
    x = normal(21, HIDDEN, dtype=dtype, seed=1)
    weights, ids = route(21)
    y = run(x, w13, w2, weights, ids, kind)
    full = kind == "full"
    assert_close(y, exact(x, values(w13, full), values(w2, full), weights, ids), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_fp8_experts_equal_float64_on_quantised_activations(fmt, dtype):
    w13, w2 = layer(fmt, dtype)
    x = normal(21, HIDDEN, dtype=dtype, seed=1)
    weights, ids = route(21)
    y = run(x, w13, w2, weights, ids, "fp8")
    expected = exact(x, values(w13, False), values(w2, False), weights, ids, quantise=fp8)
    # One of the inner values may fall on the other side of a rounding boundary.
    assert_close(y, expected, dtype, slack=8)


@pytest.mark.parametrize(
    ("sm", "kind", "fmt", "dtype"),
    [
        (80, "fast", "e4m3", torch.float16),
        (80, "full", "e4m3_row", torch.bfloat16),
        (80, "fast", "e5m2", torch.bfloat16),
        (80, "full", "e5m2", torch.float16),
        (89, "fast", "e4m3", torch.float16),
        (89, "full", "e4m3", torch.float16),
    ],
)
def test_older_gpus_multiply_both_halves_of_a_block(sm, kind, fmt, dtype):
    w13, w2 = layer(fmt, dtype)
    x = normal(30, HIDDEN, dtype=dtype, seed=1)
    weights, ids = route(30)
    assert ids.flatten().bincount().max() > TILE.bm // 2, "no block has routes in its second half"
    y = run(x, w13, w2, weights, ids, kind, arch=Arch(sm, 108, 167936))
    full = kind == "full"
    assert_close(y, exact(x, values(w13, full), values(w2, full), weights, ids), dtype)


def test_the_tile_of_these_tests_is_split_in_halves_on_older_gpus_alone():
    for arch, parts in ((Arch(80, 108, 167936), 2), (HOPPER, 1)):
        assert moe.parts_of("full", TILE, arch) == moe.parts_of("fast", TILE, arch) == parts


@pytest.mark.parametrize(("tokens", "tile"), [(1, TILE), (70, TILE._replace(bm=64, bk=16))])
def test_one_token_and_several_blocks_of_one_expert(tokens, tile):
    w13, w2 = layer("e4m3_row", torch.bfloat16)
    x = normal(tokens, HIDDEN, dtype=torch.bfloat16, seed=1)
    weights, ids = torch.ones(tokens, 1), torch.full((tokens, 1), 3)
    y = run(x, w13, w2, weights, ids, "full", tile=tile)
    assert_close(y, exact(x, values(w13, True), values(w2, True), weights, ids), x.dtype)


@pytest.mark.parametrize("bm", [16, 64], ids=["in the loop", "beforehand"])
def test_bf16_tokens_beyond_fp16_are_scaled_exactly(bm):
    w13, w2 = layer("e4m3_row", torch.bfloat16)
    x = normal(4, HIDDEN, seed=1) * torch.tensor([1e-12, 1e-3, 1e5, 1e9])[:, None]
    x = x.to(torch.bfloat16)
    weights, ids = route(4)
    y = run(x, w13, w2, weights, ids, "full", tile=TILE._replace(bm=bm))
    expected = exact(x, values(w13, True), values(w2, True), weights, ids)
    for token in range(4):
        assert_close(y[token], expected[token], x.dtype)


@pytest.mark.parametrize("tokens", [1, 9, 1500])
def test_routes_are_sorted_as_vllm_sorts_them(tokens):
    """Each expert's routes in their order, padded to whole blocks; no block without a route."""
    _, ids = route(tokens, top_k=2, experts=7)
    ids[ids == 4] = 6
    with interpreted():
        routing = sort_routes(ids, 9, 16)
    expected, experts = [], []
    for expert in range(9):
        routes = (ids.flatten() == expert).nonzero().flatten().tolist()
        padding = -len(routes) % 16
        expected += routes + [ids.numel()] * padding
        experts += [expert] * (len(expected) // 16 - len(experts))
    assert routing.padded.tolist() == [len(expected)]
    assert routing.routes[: len(expected)].tolist() == expected
    assert routing.experts[: len(experts)].tolist() == experts


def test_no_tokens_give_no_rows():
    w13, w2 = (stored(part, True) for part in layer("e4m3", torch.float16))
    x = torch.empty(0, HIDDEN, dtype=torch.float16)
    y = moe.moe(x, w13, w2, torch.empty(0, 2), torch.empty(0, 2).long(), HOPPER)
    assert y.shape == (0, HIDDEN)


def test_weights_in_different_modes_are_refused():
    w13, w2 = layer("e4m3", torch.float16)
    x, (weights, ids) = torch.empty(4, HIDDEN, dtype=torch.float16), route(4)
    with pytest.raises(ValueError, match="lower is given for one of w13 and w2"):
        moe.moe(x, stored(w13, True), stored(w2, False), weights, ids, HOPPER)
