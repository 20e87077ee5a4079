"""Contenders on the CPU: nested kernels, torch and vLLM's packed kernels."""

from collections.abc import Callable, Sequence
from functools import partial

import dps_kernels
import torch
from dps_kernels import Planes, preferred_layout, to_layout
from torch import Tensor
from torch.nn.functional import linear, silu

from dps_ray.bench.kernels.rounds import Contender
from dps_ray.bench.kernels.shapes import Dense, Moe, Shape
from dps_ray.bench.kernels.stock_cpu import PrepackedExperts, prepacked_linear
from dps_ray.bench.kernels.subject import (
    FAST,
    FULL,
    STREAM,
    Job,
    Subject,
    copies_within,
    draw_weight,
    relative_error,
)
from dps_ray.precision.encode import choose, encode
from dps_ray.precision.nested import NestedTensor

TORCH, VLLM = "torch", "vllm"
CHECK_TOKENS = 4
ROUTINGS = 64
"""Different routings that successive calls of a mixture use in turn."""
STREAM_SLICE_BYTES = 64 << 20


def make_subject(
    shape: Shape, fmt: str | None, dtype: torch.dtype, working_set_bytes: int
) -> Subject:
    """Build every contender's weights.

    Parameters
    ----------
    shape
        The layer.
    fmt
        Nested format; ``None``: what the engine would choose for these weights.
    dtype
        Of weights and activations.
    working_set_bytes
        Bytes of all copies of all contenders together, at least; above the last-level cache.
    """
    if isinstance(shape, Moe):
        return _moe(shape, fmt, dtype, working_set_bytes)
    return _dense(shape, fmt, dtype, working_set_bytes)


def _dense(shape: Dense, fmt: str | None, dtype: torch.dtype, working_set_bytes: int) -> Subject:
    weight = draw_weight(shape.rows, shape.columns, dtype=dtype, device="cpu")
    nested = _encode(weight, fmt, shape.name)
    share = working_set_bytes // 4
    whole = copies_within(share, 2 * shape.numel)
    half = copies_within(share, shape.numel)
    notes = []
    layers: dict[str, list[Callable[[Tensor], Tensor]]] = {
        FULL: [partial(_nested_linear, _planes(nested, full=True)) for _ in range(whole)],
        FAST: [partial(_nested_linear, _planes(nested, full=False)) for _ in range(half)],
        TORCH: [partial(_torch_linear, weight.clone()) for _ in range(whole)],
    }
    if prepacked_linear(weight) is None:
        notes.append(f"{shape.name}: vLLM has no packed {dtype} GEMM on this CPU, it uses torch")
    else:
        layers[VLLM] = [packed for _ in range(whole) if (packed := prepacked_linear(weight))]
    stream = _stream(share)

    def job(tokens: int) -> Job:
        x = torch.randn(tokens, shape.columns).to(dtype)
        contenders = {name: _rotating(calls, x) for name, calls in layers.items()}
        if tokens > 1:
            return Job(contenders, {})
        read = {name: 2 * shape.numel for name in layers}
        return Job(
            {**contenders, STREAM: stream},
            {**read, FAST: shape.numel, STREAM: STREAM_SLICE_BYTES},
        )

    x = torch.randn(CHECK_TOKENS, shape.columns).to(dtype)
    wanted = linear(x.float(), weight.float())
    errors = {name: relative_error(calls[0](x), wanted) for name, calls in layers.items()}
    return Subject(str(nested.fmt), job, errors, notes)


def _moe(shape: Moe, fmt: str | None, dtype: torch.dtype, working_set_bytes: int) -> Subject:
    draw = partial(draw_weight, dtype=dtype, device="cpu")
    w13 = draw(shape.experts, 2 * shape.inner, shape.hidden)
    w2 = draw(shape.experts, shape.hidden, shape.inner, seed=1)
    nested = [_encode(w, fmt, shape.name) for w in (w13, w2)]
    # A mixture reads other experts at every call: one copy of each is a working set by itself.
    share = working_set_bytes // 3
    whole = copies_within(share, 2 * shape.numel)
    half = copies_within(share, shape.numel)

    def experts(full: bool) -> Callable[..., Tensor]:
        w13_planes, w2_planes = (_planes(each, full=full) for each in nested)
        return partial(_nested_moe, w13_planes, w2_planes)

    layers: dict[str, list[Callable[..., Tensor]]] = {
        FULL: [experts(full=True) for _ in range(whole)],
        FAST: [experts(full=False) for _ in range(half)],
        VLLM: [PrepackedExperts(w13, w2) for _ in range(whole)],
    }
    stream = _stream(share)

    def job(tokens: int) -> Job:
        x = torch.randn(tokens, shape.hidden).to(dtype)
        contenders = {}
        for seed, (name, calls) in enumerate(layers.items()):
            routings = [(i, _routing(shape, tokens, ROUTINGS * seed + i)) for i in range(ROUTINGS)]
            contenders[name] = _rotating(
                [partial(calls[i % len(calls)], weights=w, ids=ids) for i, (w, ids) in routings], x
            )
        if tokens > 1:
            return Job(contenders, {})
        read = {name: 2 * shape.top_k * shape.expert_numel for name in layers}
        return Job(
            {**contenders, STREAM: stream},
            {**read, FAST: read[FULL] // 2, STREAM: STREAM_SLICE_BYTES},
        )

    x = torch.randn(CHECK_TOKENS, shape.hidden).to(dtype)
    routing = _routing(shape, CHECK_TOKENS, 0)
    wanted = _reference_moe(x, w13, w2, *routing)
    errors = {name: relative_error(calls[0](x, *routing), wanted) for name, calls in layers.items()}
    return Subject("/".join(dict.fromkeys(str(each.fmt) for each in nested)), job, errors)


def _encode(weight: Tensor, fmt: str | None, name: str) -> NestedTensor:
    if fmt is not None:
        return encode(weight, fmt)
    nested, report = choose(weight, name)
    assert nested is not None, report.reason
    return nested


def _planes(nested: NestedTensor, *, full: bool) -> Planes:
    """A copy of a nested weight, in the order in which the engine holds it for its kernels."""
    rows, columns = nested.upper.shape[-2:]
    layout = preferred_layout("cpu", rows, columns, nested.dtype)
    lower = to_layout(nested.lower, layout).clone() if full else None
    upper = to_layout(nested.upper, layout).clone()
    return Planes(upper, lower, str(nested.fmt), nested.row_shift, layout)


def _nested_linear(planes: Planes, x: Tensor) -> Tensor:
    return dps_kernels.linear(x, planes)


def _torch_linear(weight: Tensor, x: Tensor) -> Tensor:
    return linear(x, weight)


def _nested_moe(w13: Planes, w2: Planes, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return dps_kernels.moe(x, w13, w2, weights, ids)


def _routing(shape: Moe, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, shape.experts, generator=generator)
    weights, ids = logits.softmax(dim=1).topk(shape.top_k, dim=1)
    return weights / weights.sum(dim=1, keepdim=True), ids.to(torch.int32)


def _reference_moe(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    for token, experts in enumerate(ids.tolist()):
        for choice, expert in enumerate(experts):
            gate, up = (w13[expert].float() @ x[token].float()).chunk(2)
            out[token] += weights[token, choice] * (w2[expert].float() @ (silu(gate) * up))
    return out


def _rotating(calls: Sequence[Callable[[Tensor], object]], x: Tensor) -> Contender:
    return Contender(lambda i: calls[i](x), len(calls))


def _stream(nbytes: int) -> Contender:
    slices = copies_within(nbytes, STREAM_SLICE_BYTES)
    memory = torch.ones(slices, STREAM_SLICE_BYTES // 4, dtype=torch.int32)
    return Contender(lambda i: dps_kernels.read_all(memory[i]), slices)
