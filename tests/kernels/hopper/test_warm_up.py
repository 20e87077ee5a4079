"""After the warm-up batches nothing is left to compile, whatever the number of tokens."""

import json

import pytest
import torch
from dps_kernels import K16, Planes
from dps_kernels.hopper import dense, moe, table, warm_up
from dps_kernels.hopper.arch import Arch

from tests.kernels.hopper.offline import needed_compilations

ARCHS = [Arch(80, 108, 164 << 10), Arch(89, 142, 100 << 10), Arch(90, 132, 228 << 10)]
LARGEST = 8192
WEIGHTS = [(4096, 4096), (24576, 4096), (4096, 12288), (512, 256)]
MIXTURES = {(128, 8): (2048, 768), (64, 6): (2048, 1408), (8, 2): (256, 128)}
"""Experts and top-k, and their H and I."""


def meta(*shape, dtype=torch.uint8):
    return torch.empty(shape, dtype=dtype, device="meta")


def planes(*shape, full):
    plane = meta(*shape)
    return Planes(plane, plane if full else None, "e4m3_row", plane[..., 0].to(torch.int8), K16)


def linear_keys(shape, tokens, full, arch):
    x, weight = meta(tokens, shape[1], dtype=torch.bfloat16), planes(*shape, full=full)
    return needed_compilations(lambda: dense.linear(x, weight, None, arch), arch.sm)


def expert_keys(mixture, tokens, full, arch):
    (experts, top_k), (hidden, inner) = mixture, MIXTURES[mixture]
    x = meta(tokens, hidden, dtype=torch.bfloat16)
    w13 = planes(experts, 2 * inner, hidden, full=full)
    w2 = planes(experts, hidden, inner, full=full)
    weights = meta(tokens, top_k, dtype=torch.float32)
    ids = meta(tokens, top_k, dtype=torch.int32)
    return needed_compilations(lambda: moe.moe(x, w13, w2, weights, ids, arch), arch.sm)


def anything(largest):
    """All numbers of tokens up to 300, then some of every size and both sides of round ones."""
    round_ = [n + d for n in range(256, largest, 256) for d in (-1, 0, 1)]
    return sorted({*range(1, 300), *round_, *range(301, largest, 211), largest})


@pytest.mark.parametrize("full", [True, False], ids=["full", "fast"])
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: str(arch.sm))
@pytest.mark.parametrize("shape", WEIGHTS, ids=lambda shape: "x".join(map(str, shape)))
def test_no_batch_compiles_a_linear_layer_after_the_warm_up(shape, arch, full):
    counts = warm_up.token_counts(LARGEST, arch)
    warm = set().union(*(linear_keys(shape, n, full, arch) for n in counts))
    assert warm
    for tokens in anything(LARGEST):
        assert linear_keys(shape, tokens, full, arch) <= warm, tokens


@pytest.mark.parametrize("full", [True, False], ids=["full", "fast"])
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: str(arch.sm))
@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: "top {1} of {0}".format(*mixture))
def test_no_batch_compiles_experts_after_the_warm_up(mixture, arch, full):
    counts = warm_up.token_counts(LARGEST, arch, MIXTURES)
    warm = set().union(*(expert_keys(mixture, n, full, arch) for n in counts))
    assert warm
    for tokens in anything(LARGEST):
        assert expert_keys(mixture, tokens, full, arch) <= warm, tokens


def test_a_tuned_table_moves_the_warm_up_to_its_own_bounds(tmp_path, monkeypatch):
    tuned = json.loads(table.CHECKED_IN.read_text())
    first, *_, last = tuned["sm90"]["full"]
    tuned["sm90"]["full 4096x4096"] = [{**first, "tokens": 100}, last]
    tuned["sm90"]["moe full 1536x2048"] = [{**first, "tokens": 10}, last]
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(tuned))
    stock = set(warm_up.token_counts(LARGEST, ARCHS[2], [(128, 8)]))
    monkeypatch.setenv(table.OVERRIDE, str(path))
    assert {*warm_up.token_counts(LARGEST, ARCHS[2], [(128, 8)])} - stock == {100, 101, 160}


def test_no_warm_up_batch_is_larger_than_the_engine_allows():
    assert warm_up.token_counts(40, ARCHS[2], [(128, 8)]) == [1, 16, 17, 32, 33, 40]
    assert warm_up.token_counts(1, ARCHS[2]) == [1]
