"""What holds for packed weights on every instruction set that multiplies bfloat16.

A module of its own, so that it also runs in a process whose instruction set is lowered.
"""

import pytest
import torch
from dps_kernels import PACKED, Planes, isa, linear, moe, to_layout

from dps_ray.precision.encode import encode
from tests.kernels.unrouted_cases import only_routed_experts_are_read
from tests.kernels.weights import FORMATS, nested, normal, planes, values

BF16 = torch.bfloat16
LARGEST = {"e4m3": 1.8125, "e4m3_row": 1.5e38, "e5m2": 61000.0}
SMALLEST = 2.0**-126
"""Below, bfloat16 is subnormal: the instructions take it for zero."""


def packed(weight: Planes) -> Planes:
    lower = None if weight.lower is None else to_layout(weight.lower, PACKED)
    return weight._replace(upper=to_layout(weight.upper, PACKED), lower=lower, layout=PACKED)


def every_value_is_multiplied_exactly() -> None:
    """Products with unit vectors give back the weight, bit for bit, subnormal codes included."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)
    unit = torch.eye(256, dtype=BF16)
    for fmt in FORMATS:
        # Rows of one magnitude, then rows of all: their small values become FP16 subnormals.
        kept = (patterns.abs() <= LARGEST[fmt]) & (patterns.abs() >= SMALLEST)
        weight = torch.where(kept, patterns, 0.0)
        for order in (weight, weight.T.contiguous()):
            coded = encode(order, fmt)
            for full in (True, False):
                y = linear(unit, packed(planes(coded, full)))
                assert torch.equal(y.T, values(coded, full)), (fmt, full)


def products_equal_float64() -> None:
    for rows, columns in ((64, 32), (192, 160), (320, 1056)):
        for fmt in FORMATS:
            coded = nested((rows, columns), fmt, BF16)
            bias = normal(rows, seed=2)
            for full in (True, False):
                weight, exact = packed(planes(coded, full)), values(coded, full).double()
                x = normal(69, columns, dtype=BF16, seed=1)
                wanted = x.double() @ exact.T + bias.double()
                magnitude = x.double().abs() @ exact.abs().T
                bound = 2.0**-8 * wanted.abs() + 2.0**-19 * magnitude + 1e-7
                for tokens in (1, 2, 9, 16, 17, 32, 33, 48, 69):
                    y = linear(x[:tokens], weight, bias)
                    assert ((y.double() - wanted[:tokens]).abs() <= bound[:tokens]).all()


def a_token_gets_the_same_bits_in_every_batch() -> None:
    """Also where sums are put aside between chunks, and where tokens are taken in blocks."""
    weight = packed(planes(nested((320, 1056), "e4m3_row", BF16), True))
    x = normal(530, 1056, dtype=BF16, seed=1)
    alone = torch.cat([linear(row[None], weight) for row in x])
    for tokens in (2, 8, 17, 32, 33, 64, 530):
        assert torch.equal(linear(x[:tokens], weight), alone[:tokens]), tokens


def experts_equal_float64() -> None:
    experts, hidden, inner = 6, 96, 160
    for fmt in FORMATS:
        coded13 = nested((experts, 2 * inner, hidden), fmt, BF16, seed=3)
        coded2 = nested((experts, hidden, inner), fmt, BF16, seed=4)
        for full in (True, False):
            w13, w2 = values(coded13, full).double(), values(coded2, full).double()
            for tokens in (1, 5, 70):
                x = normal(tokens, hidden, dtype=BF16, seed=1)
                factors, ids = normal(tokens, experts, seed=5).softmax(dim=-1).topk(2, dim=-1)
                ids[0] = 3  # one expert twice, others perhaps never
                gate, up = torch.einsum("th,tknh->tkn", x.double(), w13[ids]).chunk(2, dim=-1)
                gated = torch.nn.functional.silu(gate) * up
                wanted = torch.einsum("tkn,tkhn,tk->th", gated, w2[ids], factors.double())
                magnitude = torch.einsum(
                    "tkn,tkhn,tk->th", gated.abs(), w2[ids].abs(), factors.double()
                )
                y = moe(
                    x, packed(planes(coded13, full)), packed(planes(coded2, full)), factors, ids
                )
                bound = 2.0**-8 * (wanted.abs() + magnitude) + 1e-6
                assert ((y.double() - wanted).abs() <= bound).all(), (fmt, full, tokens)


def a_token_gets_the_same_bits_from_its_experts_in_every_batch() -> None:
    """Also beyond one pass of tokens, and where columns of the second product go in blocks."""
    experts, hidden, inner, top_k, tokens = 16, 576, 32, 8, 2100
    w13 = packed(planes(nested((experts, 2 * inner, hidden), "e4m3_row", BF16, seed=3), True))
    w2 = packed(planes(nested((experts, hidden, inner), "e4m3_row", BF16, seed=4), True))
    x = normal(tokens, hidden, dtype=BF16, seed=1)
    factors, ids = normal(tokens, experts - 1, seed=5).softmax(dim=-1).topk(top_k, dim=-1)
    ids[0, 0] = experts - 1  # an expert of one token among experts of hundreds
    together = moe(x, w13, w2, factors, ids)
    for part in (slice(0, 1), slice(0, 9), slice(1000, 1040), slice(2030, 2070)):
        assert torch.equal(moe(x[part], w13, w2, factors[part], ids[part]), together[part]), part


def experts_get_the_same_bits_from_any_number_of_threads() -> None:
    """Also from more threads than cores, where one that waits for gated rows keeps others off."""
    experts, hidden, inner = 12, 256, 512
    w13 = packed(planes(nested((experts, 2 * inner, hidden), "e4m3_row", BF16, seed=3), True))
    w2 = packed(planes(nested((experts, hidden, inner), "e4m3_row", BF16, seed=4), True))
    threads = torch.get_num_threads()
    try:
        for tokens in (1, 5, 70):
            factors, ids = normal(tokens, experts, seed=5).softmax(dim=-1).topk(3, dim=-1)
            # Inputs alternate: rows left in memory by the call before would be the wrong ones.
            inputs = [normal(tokens, hidden, dtype=BF16, seed=seed) for seed in (1, 2)]
            torch.set_num_threads(1)
            alone = [moe(x, w13, w2, factors, ids) for x in inputs]
            for many in (2, 3, 7):
                torch.set_num_threads(many)
                for turn in range(40):
                    y = moe(inputs[turn % 2], w13, w2, factors, ids)
                    assert torch.equal(y, alone[turn % 2]), (tokens, many, turn)
    finally:
        torch.set_num_threads(threads)


def planes_of_another_dtype_are_refused_by_every_thread() -> None:
    w13 = packed(planes(nested((1, 256, 512), "e4m3_row", BF16, seed=3), True))
    w2 = packed(planes(nested((1, 512, 128), "e4m3_row", BF16, seed=4), True))
    x, weights, ids = torch.empty(64, 512, dtype=BF16), torch.ones(64, 1), torch.zeros(64, 1).long()
    wrong = w13._replace(upper=w13.upper.view(torch.int8))
    with pytest.raises(TypeError, match=r"upper is torch.int8: use torch.uint8"):
        moe(x, wrong, w2, weights, ids)


CASES = (
    every_value_is_multiplied_exactly,
    products_equal_float64,
    a_token_gets_the_same_bits_in_every_batch,
    experts_equal_float64,
    a_token_gets_the_same_bits_from_its_experts_in_every_batch,
    experts_get_the_same_bits_from_any_number_of_threads,
    planes_of_another_dtype_are_refused_by_every_thread,
)

if __name__ == "__main__":
    print(isa())
    for case in (*CASES, only_routed_experts_are_read):
        case()
