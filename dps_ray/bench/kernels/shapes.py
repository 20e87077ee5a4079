"""Layer shapes of real models, and how to name them on the command line."""

from collections.abc import Sequence
from dataclasses import dataclass

from dps_ray.config import DpsConfigError

TOKENS = (1, 4, 8, 16, 64, 256, 1024)
"""Tokens of a step, M: decode batches, then prefill chunks."""


@dataclass(frozen=True)
class Dense:
    """A linear layer of ``rows`` outputs and ``columns`` inputs."""

    name: str
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Moe:
    """Gated experts: each has w13 ``[2 * inner, hidden]`` and w2 ``[hidden, inner]``."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def expert_numel(self) -> int:
        return 3 * self.hidden * self.inner

    @property
    def numel(self) -> int:
        return self.experts * self.expert_numel


Shape = Dense | Moe

SHAPES: tuple[Shape, ...] = (
    Dense("qwen3-8b.qkv", 6144, 4096),
    Dense("qwen3-8b.o", 4096, 4096),
    Dense("qwen3-8b.gate_up", 24576, 4096),
    Dense("qwen3-8b.down", 4096, 12288),
    Moe("qwen3-30b-a3b.experts", 64, 8, 2048, 768),
    Dense("smollm2.qkv", 960, 576),
    Dense("smollm2.o", 576, 576),
    Dense("smollm2.gate_up", 3072, 576),
    Dense("smollm2.down", 576, 1536),
    Dense("smollm2.head", 49152, 576),
)
"""Qwen3-30B-A3B has 128 experts; half of them show the same routing costs in half the memory."""


def find_shapes(names: Sequence[str]) -> list[Shape]:
    """Shapes by name, by model (``qwen3-8b``) or by size (``4096x11008``: rows x columns).

    Raises
    ------
    DpsConfigError
        A name fits nothing.
    """
    found: list[Shape] = []
    for name in names:
        matches = [shape for shape in SHAPES if name in (shape.name, shape.name.split(".")[0])]
        if not matches:
            matches = [_sized(name)]
        found += [shape for shape in matches if shape not in found]
    return found


def _sized(name: str) -> Dense:
    rows, _, columns = name.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        known = ", ".join(shape.name for shape in SHAPES)
        raise DpsConfigError(f"--shapes has {name!r}: give ROWSxCOLUMNS, a model or one of {known}")
    return Dense(name, int(rows), int(columns))
