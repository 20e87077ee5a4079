"""Routed experts on a real device: against float64, and beside vLLM's own 16-bit kernel."""

import pytest
import torch
from dps_kernels import K16, Planes, moe, to_layout
from dps_kernels.hopper.arch import of_device
from dps_kernels.hopper.moe import plan_for

from dps_ray.precision.encode import encode
from dps_ray.precision.nested import NestedTensor, decode_fast, decode_full

LAYERS = {
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "wide": (8, 4096, 3584, 2),
    "odd": (5, 272, 144, 2),
}
"""Experts, H, I and top-k. Nothing divides the odd one but the 16 columns of the layout."""

ROUNDINGS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error that storing 16-bit intermediates leaves."""

FP8_ACTIVATIONS = 0.06
"""Relative error of two GEMMs in a row whose activations have three bits after the first."""


def layer(name: str, dtype: torch.dtype, fmt: str) -> tuple[NestedTensor, NestedTensor]:
    torch.manual_seed(0)
    experts, hidden, inner, _ = LAYERS[name]

    def weight(rows: int, columns: int) -> NestedTensor:
        values = torch.randn(experts, rows, columns, device="cuda") * columns**-0.5
        return encode(values.to(dtype), fmt)

    return weight(2 * inner, hidden), weight(hidden, inner)


def planes(weight: NestedTensor, full: bool) -> Planes:
    upper = to_layout(weight.upper, K16)
    lower = to_layout(weight.lower, K16) if full else None
    return Planes(upper, lower, weight.fmt.value, weight.row_shift, K16)


def routed(name: str, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    experts, hidden, _, top_k = LAYERS[name]
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    weights, ids = torch.randn(tokens, experts, device="cuda").softmax(-1).topk(top_k)
    return x, weights, ids.int()


def exact(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *w: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ w[0][expert].double().T).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ w[1][expert].double().T
        out.index_add_(0, token, rows * weights[token, choice].double()[:, None])
    return out


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("tokens", [1, 8, 64, 500, 4096])
@pytest.mark.parametrize("full", [True, False], ids=["full", "fast"])
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [("e4m3", torch.float16), ("e4m3_row", torch.bfloat16), ("e5m2", torch.float16)],
)
@pytest.mark.parametrize("name", LAYERS)
def test_experts_equal_float64(
    name: str, fmt: str, dtype: torch.dtype, full: bool, tokens: int
) -> None:
    w13, w2 = layer(name, dtype, fmt)
    x, weights, ids = routed(name, tokens, dtype)
    decode = decode_full if full else decode_fast
    reference = exact(x, weights, ids, decode(w13), decode(w2))
    first, second = planes(w13, full), planes(w2, full)
    found = error(moe(x, first, second, weights, ids), reference)
    fp8 = plan_for(ids.numel(), first, of_device(x.device)).kind == "fp8"
    assert found <= (FP8_ACTIVATIONS if fp8 else ROUNDINGS[dtype])


@pytest.mark.parametrize("tokens", [1, 32, 1024])
@pytest.mark.parametrize(("fmt", "dtype"), [("e4m3", torch.float16), ("e4m3_row", torch.bfloat16)])
def test_full_mode_is_as_exact_as_vllm(fmt: str, dtype: torch.dtype, tokens: int) -> None:
    fused_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.fused_moe")
    w13, w2 = layer("qwen3-30b-a3b", dtype, fmt)
    x, weights, ids = routed("qwen3-30b-a3b", tokens, dtype)
    unsplit = decode_full(w13).to(dtype), decode_full(w2).to(dtype)
    reference = exact(x, weights, ids, *unsplit)
    ours = error(moe(x, planes(w13, True), planes(w2, True), weights, ids), reference)
    theirs = error(fused_moe.fused_experts(x, *unsplit, weights, ids), reference)
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("full", [True, False])
def test_a_captured_graph_repeats_the_bits(full: bool) -> None:
    """Nothing waits for the device, and no sum depends on which program ends first."""
    w13, w2 = (planes(part, full) for part in layer("qwen3-30b-a3b", torch.bfloat16, "e4m3_row"))
    x, weights, ids = routed("qwen3-30b-a3b", 32, torch.bfloat16)
    eager = moe(x, w13, w2, weights, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe(x, w13, w2, weights, ids)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)


def test_fp8_sums_are_promoted_often_enough() -> None:
    """The FP8 tensor cores keep about 14 bits of a sum; the kernel moves it out in time."""
    w13, w2 = layer("wide", torch.bfloat16, "e4m3_row")
    x, weights, ids = routed("wide", 4096, torch.bfloat16)
    positive = x.abs()
    reference = exact(positive, weights, ids, decode_fast(w13).abs(), decode_fast(w2).abs())
    w13.upper.bitwise_and_(0x7F)
    w2.upper.bitwise_and_(0x7F)
    found = error(moe(positive, planes(w13, False), planes(w2, False), weights, ids), reference)
    assert found <= 0.01
