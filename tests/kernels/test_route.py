"""Choosing experts: as torch's own operators choose, ties included."""

import pytest
import torch
from dps_kernels import route

from tests.kernels.weights import normal

HALVES = (torch.float16, torch.bfloat16)
SIZES = ((8, 2), (64, 8), (512, 8), (256, 1), (4, 4))


def by_torch(logits, top_k):
    best, ids = torch.topk(logits, top_k, dim=-1, sorted=False)
    return best.softmax(dim=-1).float(), ids


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_experts_and_weights_are_those_of_torch(experts, top_k, dtype):
    logits = normal(300, experts, dtype=dtype, seed=1)
    weights, ids = route(logits, top_k)
    wanted, wanted_ids = by_torch(logits, top_k)
    assert torch.equal(ids, wanted_ids)
    tolerance = 0.0 if dtype in HALVES else 1e-6
    torch.testing.assert_close(weights, wanted, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_ties_go_to_the_experts_that_torch_takes(experts, top_k):
    logits = normal(300, experts, dtype=torch.bfloat16, seed=1).round()
    weights, ids = route(logits, top_k)
    wanted, wanted_ids = by_torch(logits, top_k)
    assert torch.equal(ids, wanted_ids)
    assert torch.equal(weights, wanted)


def test_a_logit_that_is_no_number_spoils_its_token_alone():
    logits = normal(3, 8, dtype=torch.bfloat16, seed=1)
    logits[1, 5] = float("nan")
    weights, ids = route(logits, 2)
    assert torch.equal(ids, by_torch(logits, 2)[1])
    assert weights.isnan().all(dim=1).tolist() == [False, True, False]


def test_no_tokens_get_no_experts():
    weights, ids = route(torch.empty(0, 8, dtype=torch.bfloat16), 2)
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.usefixtures("path")
def test_more_experts_than_there_are_is_refused():
    with pytest.raises(RuntimeError, match=r"top_k is 9: take 1 to 8|out of range"):
        route(torch.empty(1, 8), 9)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("logits", [torch.empty(1, 8, dtype=torch.float64), torch.empty(2, 1, 8)])
def test_logits_of_another_kind_are_refused_by_shape_and_dtype(logits):
    with pytest.raises(ValueError, match=r"logits is torch.float\d\d of shape .*: \[tokens, exp"):
        route(logits, 2)
