"""What the CPU kernels must reach on the layers that the bench knows by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dps_ray.bench.kernels.shapes import SHAPES, TOKENS, Moe
from dps_ray.bench.kernels.subject import FAST, FULL

MOST = max(TOKENS)


@dataclass(frozen=True)
class Target:
    """The least median of one figure of a mode, for numbers of tokens from one to another."""

    figure: str
    mode: str
    first: int
    last: int
    least: float


SHARE_OF_STREAM = tuple(Target("bandwidth_share", mode, 1, 1, 0.85) for mode in (FULL, FAST))
DENSE = (
    Target("speedup", FULL, 1, 16, 1.0),
    Target("speedup", FULL, 17, 255, 0.85),
    Target("speedup", FULL, 256, MOST, 0.95),
    Target("speedup", FAST, 1, 1, 1.8),
    Target("speedup", FAST, 2, 8, 1.5),
    Target("speedup", FAST, 9, 255, 0.9),
    Target("speedup", FAST, 256, MOST, 0.95),
    *SHARE_OF_STREAM,
)
EXPERTS = (
    Target("speedup", FULL, 1, MOST, 0.95),
    Target("speedup", FAST, 1, 16, 1.7),
    *SHARE_OF_STREAM,
)
TARGETS = {shape.name: EXPERTS if isinstance(shape, Moe) else DENSE for shape in SHAPES}


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Which targets the rows of named layers reach; layers given by size have none."""
    held = {}
    for row in rows:
        for target in TARGETS.get(row["shape"], ()):
            if target.first <= row["tokens"] <= target.last:
                median = row[target.figure][target.mode]["median"]
                held[_label(row, target, median)] = median >= target.least
    return held


def _label(row: dict[str, Any], target: Target, median: float) -> str:
    what = f"x {row['rival']}" if target.figure == "speedup" else "of stream bandwidth"
    return (
        f"{row['shape']} {row['format']} M={row['tokens']} threads={row['threads']}: "
        f"{target.mode} >= {target.least} {what} ({median:.2f})"
    )
