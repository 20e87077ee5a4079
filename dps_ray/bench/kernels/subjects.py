"""Builds the contenders of a layer shape: its weights, nested and stock, in many copies."""

from collections.abc import Callable, Mapping
from functools import partial

import dps_kernels
import torch
from dps_kernels import Planes, preferred_layout, to_layout
from torch import Tensor
from torch.nn.functional import linear, silu

from dps_ray.bench.kernels.rounds import Contender
from dps_ray.bench.kernels.shapes import Dense, Moe, Shape
from dps_ray.bench.kernels.subject import (
    FAST,
    FP8,
    FULL,
    PEAK,
    STREAM,
    VLLM,
    Device,
    Job,
    Subject,
    copies_within,
    draw_weight,
    relative_error,
)
from dps_ray.precision.encode import choose, encode
from dps_ray.precision.nested import NestedTensor

CHECK_TOKENS = 4
STREAM_TOKENS = 64
"""Up to so many tokens, rows are compared with a plain read of memory."""
PEAK_TOKENS = 256
"""From so many tokens on, rows are compared with the arithmetic peak."""
ROUTINGS = 64
"""Different routings that successive calls of a mixture use in turn."""
STREAM_SLICE_BYTES = 64 << 20

Kernels = dict[str, list[Callable[..., Tensor]]]
"""Each contender's kernel on every copy of its weight."""


def make_subject(
    device: Device, shape: Shape, fmt: str | None, dtype: torch.dtype, working_set_bytes: int
) -> Subject:
    """Build every contender's weights.

    Parameters
    ----------
    device
        Where to build them.
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
        return _moe(device, shape, fmt, dtype, working_set_bytes)
    return _dense(device, shape, fmt, dtype, working_set_bytes)


def _dense(
    device: Device, shape: Dense, fmt: str | None, dtype: torch.dtype, working_set_bytes: int
) -> Subject:
    weight = draw_weight(shape.rows, shape.columns, dtype=dtype, device=device.type)
    nested = _encode(weight, fmt, shape.name)
    share = working_set_bytes // 4
    whole = copies_within(share, 2 * shape.numel)
    half = copies_within(share, shape.numel)
    stock = [device.linears(weight) for _ in range(whole)]
    kernels: Kernels = {
        FULL: [_linear(_planes(nested, full=True), dtype) for _ in range(whole)],
        FAST: [_linear(_planes(nested, full=False), dtype) for _ in range(half)],
        **{name: [copy[name] for copy in stock] for name in stock[0]},
    }
    notes = []
    if device.type == "cpu" and VLLM not in kernels:
        notes.append(f"{shape.name}: vLLM has no packed {dtype} GEMM on this CPU, it uses torch")
    probes = _Probes(device, dtype, share)

    def job(tokens: int) -> Job:
        x = torch.randn(tokens, shape.columns, device=device.type).to(dtype)
        contenders = {
            name: device.rotating([partial(call, x) for call in calls])
            for name, calls in kernels.items()
        }
        read = dict.fromkeys(contenders, shape.numel)
        return probes.beside(contenders, tokens, read, 2 * tokens * shape.numel)

    x = torch.randn(CHECK_TOKENS, shape.columns, device=device.type).to(dtype)
    wanted = linear(x.float(), weight.float())
    errors = {name: relative_error(calls[0](x), wanted) for name, calls in kernels.items()}
    return Subject(str(nested.fmt), job, errors, notes)


def _moe(
    device: Device, shape: Moe, fmt: str | None, dtype: torch.dtype, working_set_bytes: int
) -> Subject:
    draw = partial(draw_weight, dtype=dtype, device=device.type)
    w13 = draw(shape.experts, 2 * shape.inner, shape.hidden)
    w2 = draw(shape.experts, shape.hidden, shape.inner, seed=1)
    nested = [_encode(w, fmt, shape.name) for w in (w13, w2)]
    # A mixture reads other experts at every call: one copy of each is a working set by itself.
    share = working_set_bytes // 3
    whole = copies_within(share, 2 * shape.numel)
    half = copies_within(share, shape.numel)

    def experts(full: bool) -> Callable[..., Tensor]:
        w13_planes, w2_planes = (_planes(each, full=full) for each in nested)
        return dps_kernels.prepare_moe(w13_planes, w2_planes, dtype)

    stock = [device.experts(w13, w2) for _ in range(whole)]
    kernels: Kernels = {
        FULL: [experts(full=True) for _ in range(whole)],
        FAST: [experts(full=False) for _ in range(half)],
        **{name: [copy[name] for copy in stock] for name in stock[0]},
    }
    probes = _Probes(device, dtype, share)

    def job(tokens: int) -> Job:
        x = torch.randn(tokens, shape.hidden, device=device.type).to(dtype)
        contenders, read = {}, {}
        for seed, (name, calls) in enumerate(kernels.items()):
            turns, routed = [], 0
            for i in range(ROUTINGS):
                weights, ids = _routing(shape, tokens, ROUTINGS * seed + i, device.type)
                turns.append(partial(calls[i % len(calls)], x, weights, ids))
                routed += ids.unique().numel()
            contenders[name] = device.rotating(turns)
            read[name] = routed / ROUTINGS * shape.expert_numel
        flops = 2 * tokens * shape.top_k * shape.expert_numel
        return probes.beside(contenders, tokens, read, flops)

    x = torch.randn(CHECK_TOKENS, shape.hidden, device=device.type).to(dtype)
    weights, ids = _routing(shape, CHECK_TOKENS, 0, device.type)
    wanted = _reference_moe(x, w13, w2, weights, ids)
    errors = {
        name: relative_error(calls[0](x, weights, ids), wanted) for name, calls in kernels.items()
    }
    return Subject("/".join(dict.fromkeys(str(each.fmt) for each in nested)), job, errors)


class _Probes:
    """The machine's ceilings: reading at few tokens, arithmetic at many."""

    def __init__(self, device: Device, dtype: torch.dtype, stream_bytes: int) -> None:
        slices = copies_within(stream_bytes, STREAM_SLICE_BYTES)
        shape = (slices, STREAM_SLICE_BYTES // 4)
        memory = torch.ones(shape, dtype=torch.float32, device=device.type)
        self._stream = device.rotating([partial(device.read, part) for part in memory])
        self._peak = device.peak(dtype)

    def beside(
        self, contenders: dict[str, Contender], tokens: int, read: Mapping[str, float], flops: int
    ) -> Job:
        """Add the probe that fits ``tokens`` to contenders.

        Parameters
        ----------
        contenders
            What is timed.
        tokens
            Tokens of a call.
        read
            Weights that a call of each must read.
        flops
            Operations of a call.
        """
        read_bytes = {
            name: weights if name in (FAST, FP8) else 2 * weights for name, weights in read.items()
        }
        job = Job(dict(contenders), read_bytes, dict.fromkeys(contenders, flops))
        if tokens <= STREAM_TOKENS:
            job.contenders[STREAM] = self._stream
            job.read_bytes[STREAM] = STREAM_SLICE_BYTES
        elif self._peak is not None and tokens >= PEAK_TOKENS:
            job.contenders[PEAK] = self._peak.contenders[PEAK]
            job.flops[PEAK] = self._peak.flops[PEAK]
        return job


def _encode(weight: Tensor, fmt: str | None, name: str) -> NestedTensor:
    if fmt is not None:
        return encode(weight, fmt)
    nested, report = choose(weight, name)
    assert nested is not None, report.reason
    return nested


def _planes(nested: NestedTensor, *, full: bool) -> Planes:
    """A copy of a nested weight, in the order in which the engine holds it for its kernels."""
    rows, columns = nested.upper.shape[-2:]
    layout = preferred_layout(nested.upper.device.type, rows, columns, nested.dtype)
    lower = to_layout(nested.lower, layout).clone() if full else None
    upper = to_layout(nested.upper, layout).clone()
    return Planes(upper, lower, str(nested.fmt), nested.row_shift, layout)


def _linear(planes: Planes, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    product = dps_kernels.prepare_linear(planes, dtype)
    return lambda x: product(x, None)


def _routing(shape: Moe, tokens: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, shape.experts, generator=generator)
    weights, ids = logits.softmax(dim=1).topk(shape.top_k, dim=1)
    normal = weights / weights.sum(dim=1, keepdim=True)
    return normal.to(device), ids.to(device, torch.int32)


def _reference_moe(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, device=x.device)
    for token, experts in enumerate(ids.tolist()):
        for choice, expert in enumerate(experts):
            gate, up = (w13[expert].float() @ x[token].float()).chunk(2)
            out[token] += weights[token, choice] * (w2[expert].float() @ (silu(gate) * up))
    return out
