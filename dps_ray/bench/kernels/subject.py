"""What one layer shape gives to time: contenders by name, who is a rival and what is read."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dps_ray.bench.kernels.rounds import Contender

FULL, FAST, STREAM = "full", "fast", "stream"
"""Names of the nested contenders and of the bandwidth probe; every other contender is stock."""


@dataclass(frozen=True)
class Job:
    """One comparison to run: a layer shape at one number of tokens."""

    contenders: dict[str, Contender]
    read_bytes: dict[str, int]
    """Bytes a call must at least read, of the contenders whose share of bandwidth is of use."""


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
