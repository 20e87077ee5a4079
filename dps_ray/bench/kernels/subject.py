"""What one layer shape gives to time: contenders by name, who is a rival and what is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dps_ray.bench.kernels.rounds import Contender
from dps_ray.bench.kernels.shapes import Shape

FULL, FAST = "full", "fast"
TORCH, VLLM, FP8 = "torch", "vllm", "vllm fp8"
STREAM, PEAK = "stream", "peak"
"""Names of the nested kernels, of the stock ones and of the probes of the machine's ceilings."""

RIVALS = (TORCH, VLLM)
"""Stock 16-bit kernels: what nested ones replace. FP8 is shown beside fast mode."""


@dataclass(frozen=True)
class Job:
    """One comparison to run: a layer shape at one number of tokens."""

    contenders: dict[str, Contender]
    read_bytes: dict[str, float] = field(default_factory=dict)
    """Bytes of weights that a call must read, and bytes that the stream probe reads."""
    flops: dict[str, int] = field(default_factory=dict)
    """Operations of a call, and of the probe of the arithmetic peak."""


class Device(Protocol):
    """Where kernels run, and the stock ones there."""

    type: str
    """torch's name of the device type."""

    def figures(self) -> dict[str, Any]:
        """What the report says of the device."""

    def synchronize(self) -> None:
        """Wait for everything launched."""

    def lacks(self, shape: Shape) -> str | None:
        """Why a shape cannot be measured here, in a sentence."""

    def linears(self, weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
        """Stock kernels for a 16-bit weight ``[N, K]``, each on a copy of its own."""

    def experts(self, w13: Tensor, w2: Tensor) -> dict[str, Callable[..., Tensor]]:
        """Stock kernels for experts: called with ``x``, ``weights`` and ``ids``."""

    def read(self, memory: Tensor) -> object:
        """Read a tensor once, as fast as can be."""

    def rotating(self, calls: Sequence[Callable[[], object]]) -> Contender:
        """A contender that goes round equal calls on different memory."""

    def peak(self, dtype: torch.dtype) -> Job | None:
        """A probe of the arithmetic peak, where rows are to be compared with it."""


@dataclass(frozen=True)
class Subject:
    """One layer shape in one dtype and format, with its weights made."""

    fmt: str
    job: Callable[[int], Job]
    """Contenders for M tokens."""
    errors: dict[str, float]
    """Largest error of each contender against float32, relative to the largest output."""
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest deviation, relative to the largest wanted value."""
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


def copies_within(budget_bytes: int, nbytes: int) -> int:
    """Copies of an operand that fill ``budget_bytes``."""
    return max(1, -(-budget_bytes // nbytes))


def draw_weight(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Normal weights that keep the scale of activations."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)
    return weight.mul_(shape[-1] ** -0.5).to(dtype)
