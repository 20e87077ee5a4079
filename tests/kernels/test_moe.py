"""Routed experts against a float64 loop over tokens."""

import pytest
import torch
from dps_kernels import moe

from tests.kernels.weights import DTYPES, FORMATS, nested, normal, planes, values

pytestmark = pytest.mark.usefixtures("path")

EXPERTS, HIDDEN, INNER, TOP_K = 6, 40, 36, 2


def layer(fmt, dtype):
    w13 = nested((EXPERTS, 2 * INNER, HIDDEN), fmt, dtype, seed=3)
    return w13, nested((EXPERTS, HIDDEN, INNER), fmt, dtype, seed=4)


def routing(tokens, experts=EXPERTS):
    scores = normal(tokens, experts, seed=5).softmax(dim=-1)
    return scores.topk(TOP_K, dim=-1)


def expected(x, w13, w2, weights, ids):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].double(), ids[token], strict=True):
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 23])
def test_experts_equal_float64(tokens, fmt, dtype, full):
    w13, w2 = layer(fmt, dtype)
    x = normal(tokens, HIDDEN, dtype=dtype, seed=1)
    weights, ids = routing(tokens)
    y = moe(x, planes(w13, full), planes(w2, full), weights, ids.int())
    exact = expected(x, values(w13, full), values(w2, full), weights, ids)
    assert y.dtype == dtype
    tolerance = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    assert ((y.double() - exact).abs() <= tolerance * exact.abs() + 1e-5 * exact.abs().max()).all()


def test_long_batches_equal_their_halves():
    w13, w2 = (planes(part, True) for part in layer("e4m3", torch.float16))
    x = normal(1100, HIDDEN, seed=1)
    weights, ids = routing(1100, experts=3)
    whole = moe(x, w13, w2, weights, ids)
    halves = [moe(x[s], w13, w2, weights[s], ids[s]) for s in (slice(0, 500), slice(500, 1100))]
    torch.testing.assert_close(whole, torch.cat(halves), rtol=1e-5, atol=1e-6)


def test_one_expert_takes_every_token_and_the_others_none():
    w13, w2 = layer("e5m2", torch.float16)
    x = normal(9, HIDDEN, seed=1)
    ids = torch.full((9, 1), 4)
    weights = torch.ones(9, 1)
    y = moe(x, planes(w13, True), planes(w2, True), weights, ids)
    exact = expected(x, values(w13, True), values(w2, True), weights, ids)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_rows():
    w13, w2 = (planes(part, False) for part in layer("e4m3", torch.float16))
    y = moe(torch.empty(0, HIDDEN), w13, w2, torch.empty(0, 2), torch.empty(0, 2).long())
    assert y.shape == (0, HIDDEN)


def test_bad_arguments_are_named_with_their_values():
    w13, w2 = (planes(part, True) for part in layer("e4m3", torch.float16))
    x, weights, ids = torch.empty(2, HIDDEN), torch.ones(2, 1), torch.zeros(2, 1).long()
    with pytest.raises(ValueError, match=r"x has shape \(2, 39\)"):
        moe(x[:, 1:], w13, w2, weights, ids)
    with pytest.raises(ValueError, match="w2 has shape"):
        moe(x, w13, w13, weights, ids)
    with pytest.raises(ValueError, match="topk_weights has shape"):
        moe(x, w13, w2, weights[:1], ids)
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        moe(x, w13, w2, weights, ids, activation="gelu")
    with pytest.raises((ValueError, RuntimeError, IndexError), match=r"topk_ids|out of"):
        moe(x, w13, w2, weights, ids + EXPERTS)
