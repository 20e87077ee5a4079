"""Split layers under the default kernel: experts, and linear ones eager and traced."""

import uuid
from collections.abc import Iterator
from typing import Any

import dps_kernels
import pytest
import torch
from dps_kernels import Planes, elastic
from torch.nn import Parameter
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import select_experts

from dps_ray.config import DpsOptions
from dps_ray.engine import rank as ranks
from dps_ray.engine.moe import DpsMoEMethod
from dps_ray.engine.ops import FusedExperts
from dps_ray.engine.quantization import DpsHeadMethod, DpsLinearMethod, register_quantization
from dps_ray.engine.rank import Rank
from dps_ray.engine.split_weight import encode_weight, place_fused
from dps_ray.engine.status_page import StatusPage
from dps_ray.memory.geometry import plan_geometry
from dps_ray.modes import Mode
from dps_ray.precision.encode import encode
from dps_ray.precision.nested import decode_fast, decode_full

ROWS, COLUMNS = 64, 96
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture
def rank() -> Iterator[Rank]:
    """This process's rank; every split layer has a shift per row."""
    key = uuid.uuid4().hex[:16]
    page = StatusPage.create(key)
    yield ranks.begin(DpsOptions(key=key, formats=("e4m3_row",)), 0, torch.device("cpu"))
    ranks.end()
    page.remove()


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def split_layer(rank: Rank, method: DpsLinearMethod, weight: torch.Tensor) -> torch.nn.Module:
    """A layer whose weight has been split, with memory behind its residual."""
    register_quantization()
    layer = torch.nn.Module()
    layer.weight = Parameter(weight.clone(), requires_grad=False)
    method.process_weights_after_loading(layer)
    build_region(rank)
    return layer


def experts_layer(**changes: Any) -> tuple[Any, Any]:
    """Four experts that have been split, and their layer; routed plainly unless changed."""
    activation = MoEActivation.SILU
    moe = FusedMoEConfig(
        num_experts=4, num_local_experts=4, num_logical_experts=4, experts_per_token=2,
        hidden_dim=96, intermediate_size=64, activation=activation, device="cpu",
        routing_method=RoutingMethodType.Renormalize, in_dtype=torch.bfloat16,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
    )  # fmt: skip
    layer: Any = torch.nn.Module()
    for name, shape in (("w13", (4, 128, 96)), ("w2", (4, 96, 64))):
        weight = normal(*shape, dtype=torch.bfloat16, seed=4) * 0.05
        layer.register_parameter(f"{name}_weight", Parameter(weight, requires_grad=False))
    given = {"activation": activation, "moe_config": moe, "_expert_routing_tables": lambda: None}
    router = {"use_grouped_topk": False, "renormalize": True, "scoring_func": "softmax"}
    for name, value in {**given, **router, "custom_routing_function": None, **changes}.items():
        setattr(layer, name, value)
    for name in ("num_expert_group", "topk_group", "e_score_correction_bias"):
        setattr(layer, name, None)
    layer.routed_scaling_factor = 1.0
    with set_current_vllm_config(VllmConfig()):
        method = DpsMoEMethod(moe, "model.layers.0.mlp.experts")
        method.process_weights_after_loading(layer)
    return method, layer


def build_region(rank: Rank) -> None:
    rank.build_region(
        plan_geometry(
            kv_bytes=1 << 20, residual_bytes=rank.arena.used_bytes, block_bytes=1 << 16,
            granularity_bytes=rank.arena.driver.granularity_bytes, unit_bytes=None,
        )
    )  # fmt: skip


def assert_close(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> None:
    """One rounding of the result and float32's error in the sum of magnitudes."""
    exact = x.double() @ weight.double().T + bias.double()
    magnitude = x.double().abs() @ weight.double().abs().T
    bound = ROUNDING[y.dtype] * exact.abs() + 2.0**-19 * magnitude + 1e-7
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("tracing", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["packed", "row-major"])
def test_fused_layer_equals_float64_in_both_modes(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tracing: bool
) -> None:
    weight = normal(ROWS, COLUMNS, dtype=dtype, seed=0) * 0.05
    weight[0] *= 100
    nested = encode(weight, "e4m3_row")
    assert nested.row_shift is not None
    assert len(nested.row_shift.unique()) > 1
    method = DpsLinearMethod("model.layers.0.self_attn.qkv_proj")
    layer: Any = split_layer(rank, method, weight)
    assert (layer.dps_fused is not None) == rank.fused
    # While Dynamo traces, the opaque operation stands in the graph instead of the layer's object.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: tracing)
    bias = normal(ROWS, dtype=dtype, seed=1)
    for tokens in (1, 7):
        x = normal(tokens, COLUMNS, dtype=dtype, seed=2)
        for mode, values in ((Mode.FULL, decode_full(nested)), (Mode.FAST, decode_fast(nested))):
            rank.mode = mode
            assert_close(method.apply(layer, x, bias), x, values, bias)
            assert_close(method.apply(layer, x), x, values, torch.zeros_like(bias))


def test_compiled_layer_prepares_its_product_once(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, prepared = elastic.compiled_product, []

    def counted(planes: Planes, dtype: torch.dtype) -> Any:
        prepared.append(planes)
        return prepare(planes, dtype)

    monkeypatch.setattr(elastic, "compiled_product", counted)
    method = DpsLinearMethod("model.layers.0.self_attn.qkv_proj")
    layer: Any = split_layer(rank, method, normal(ROWS, COLUMNS, dtype=torch.bfloat16, seed=0))
    compiled = torch.compile(lambda x: method.apply(layer, x), backend="eager", fullgraph=True)
    x = normal(3, COLUMNS, dtype=torch.bfloat16, seed=2)
    for mode in (Mode.FULL, Mode.FAST, Mode.FULL):
        rank.mode = mode
        assert torch.equal(compiled(x), method.apply(layer, x))
    assert len(prepared) == (1 if rank.fused else 0)


def test_layer_reads_no_residual_once_its_rank_has_ended(rank: Rank) -> None:
    method = DpsLinearMethod("model.layers.0.self_attn.qkv_proj")
    layer: Any = split_layer(rank, method, normal(ROWS, COLUMNS, dtype=torch.bfloat16, seed=0))
    address = layer.dps_lower.data_ptr()
    rank.mode = Mode.FULL
    assert rank.access.may_read(address)
    ranks.end()
    assert not rank.access.may_read(address)


def test_experts_read_lower_bytes_only_where_both_weights_may_be_read(rank: Rank) -> None:
    dtype = torch.bfloat16
    split = []
    for name, shape in (("w13", (4, 128, 96)), ("w2", (4, 96, 64))):
        encoded = encode_weight(
            f"model.layers.0.mlp.experts.{name}", normal(*shape, dtype=dtype, seed=4) * 0.05
        )
        assert encoded is not None
        split.append(place_fused(encoded))
    build_region(rank)
    planes = [weight.planes_full() for weight in split]
    fast = [each._replace(lower=None) for each in planes]
    experts = FusedExperts(*planes, dtype)
    x, ids = normal(3, 96, dtype=dtype, seed=5), torch.tensor([[0, 1], [2, 3], [1, 2]])
    weights = torch.full((3, 2), 0.5)
    in_full, in_fast = (dps_kernels.moe(x, *each, weights, ids) for each in (planes, fast))
    assert not torch.equal(in_full, in_fast)
    rank.mode = Mode.FULL
    assert torch.equal(experts(x, weights, ids), in_full)
    rank.mode = Mode.FAST
    addresses = [weight.lower.data_ptr() for weight in split]
    for readable in ([], addresses[:1], addresses[1:]):
        rank.access.addresses = set(readable)
        assert torch.equal(experts(x, weights, ids), in_fast)
    rank.access.addresses = set(addresses)
    assert torch.equal(experts(x, weights, ids), in_full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_routing_equals_vllms_own_where_logits_tie_too(dtype: torch.dtype) -> None:
    for tokens, experts, top_k in ((1, 8, 2), (9, 8, 2), (5, 128, 8), (3, 16, 1)):
        for logits in (
            normal(tokens, experts, dtype=dtype, seed=tokens),
            normal(tokens, experts, dtype=dtype, seed=tokens).round(),
        ):
            weights, ids = dps_kernels.route(logits, top_k)
            wanted, experts_wanted = select_experts(logits, logits, top_k, False, True)
            assert weights.dtype == torch.float32
            tolerance = 1e-6 if dtype == torch.float32 else 0.0
            torch.testing.assert_close(weights, wanted, rtol=tolerance, atol=0.0)
            assert torch.equal(ids, experts_wanted.long())


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        ({"scoring_func": "sigmoid"}, False),
        ({"renormalize": False}, False),
        ({"use_grouped_topk": True}, False),
        ({"custom_routing_function": print}, False),
    ],
)
def test_only_plain_routing_is_taken_from_vllm(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], ours: bool
) -> None:
    method, layer = experts_layer(**changes)
    weights, ids = torch.empty(0), torch.empty(0)
    stock = method.moe_kernel.fused_experts
    monkeypatch.setattr(stock, "_select_experts", lambda *_: (weights, ids))
    logits = normal(3, 4, dtype=torch.bfloat16, seed=6)
    assert (method._route(layer, logits, logits)[0] is weights) is not ours


def test_output_head_without_a_packed_gemm_equals_float64(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dps_ray.engine.quantization.is_plain_torch", lambda _: True)
    weight = normal(ROWS, COLUMNS, dtype=torch.float16, seed=0)
    head: Any = torch.nn.Module()
    head.weight = Parameter(weight.clone(), requires_grad=False)
    method = DpsHeadMethod()
    method.process_weights_after_loading(head)
    assert head.dps_blocked == rank.fused
    x, bias = (normal(n, COLUMNS, dtype=torch.float16, seed=n) for n in (1, 3))
    offset = bias.reshape(-1)[:ROWS]
    assert_close(method.apply(head, x, offset), x, weight, offset)
    assert_close(method.apply(head, x), x, weight, torch.zeros_like(offset))
