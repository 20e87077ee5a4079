"""What the load did to every layer, for the operator: format, range, inexact values, bytes."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from dps_ray.precision.formats import Format


@dataclass(frozen=True)
class LayerReport:
    """Outcome of choosing a format for one layer; an unsplit layer has ``fmt`` ``None``."""

    name: str
    fmt: Format | None
    reason: str
    """Why this format, or why none."""
    shape: tuple[int, ...]
    dtype: str
    max_abs: float
    """Largest magnitude in the checkpoint's layer; NaN or infinite if some weight is."""
    shift_min: int = 0
    shift_max: int = 0
    """Range of the power-of-two row shifts."""
    misfits: int = 0
    """Values that the format does not represent exactly; full mode patches them."""
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    """Worst error of a misfit before it is patched."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def upper_bytes(self) -> int:
        """Persistent bytes, 0 if unsplit."""
        return 0 if self.fmt is None else self.elements

    @property
    def lower_bytes(self) -> int:
        """Bytes that can be lent to the KV cache, 0 if unsplit."""
        return 0 if self.fmt is None else self.elements

    @property
    def unsplit_bytes(self) -> int:
        """Bytes of the layer where it stays 16-bit, else 0."""
        return 2 * self.elements if self.fmt is None else 0

    def as_dict(self) -> dict[str, Any]:
        """Fields and byte counts as JSON values; a non-finite ``max_abs`` becomes ``None``."""
        return asdict(self) | {
            "shape": list(self.shape),
            "max_abs": self.max_abs if math.isfinite(self.max_abs) else None,
            "upper_bytes": self.upper_bytes,
            "lower_bytes": self.lower_bytes,
            "unsplit_bytes": self.unsplit_bytes,
        }


@dataclass(frozen=True)
class Totals:
    """Sums over all layers of a model."""

    layers: int
    split: int
    unsplit: int
    misfits: int
    upper_bytes: int
    lower_bytes: int
    unsplit_bytes: int
    formats: dict[str, int]
    """Number of layers in each format that occurs."""


@dataclass
class LoadReport:
    """The layers of one rank, in load order."""

    layers: list[LayerReport] = field(default_factory=list)

    def add(self, layer: LayerReport) -> None:
        self.layers.append(layer)

    def totals(self) -> Totals:
        split = [layer for layer in self.layers if layer.fmt is not None]
        used = [layer.fmt.value for layer in split if layer.fmt is not None]
        return Totals(
            layers=len(self.layers),
            split=len(split),
            unsplit=len(self.layers) - len(split),
            misfits=sum(layer.misfits for layer in self.layers),
            upper_bytes=sum(layer.upper_bytes for layer in self.layers),
            lower_bytes=sum(layer.lower_bytes for layer in self.layers),
            unsplit_bytes=sum(layer.unsplit_bytes for layer in self.layers),
            formats={fmt: used.count(fmt) for fmt in sorted(set(used))},
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "totals": asdict(self.totals()),
            "layers": [layer.as_dict() for layer in self.layers],
        }

    def table(self) -> str:
        """Aligned text, one layer a line, with a line of totals at the end."""
        rows = [_HEADER, *(_row(layer) for layer in self.layers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        totals = self.totals()
        formats = ", ".join(f"{count} {fmt}" for fmt, count in totals.formats.items()) or "none"
        lines.append(
            f"{totals.split} of {totals.layers} layers split ({formats}); "
            f"upper {totals.upper_bytes:,} B, lower {totals.lower_bytes:,} B, "
            f"unsplit {totals.unsplit_bytes:,} B; {totals.misfits:,} values patched in full mode"
        )
        return "\n".join(lines)


_HEADER = (
    "layer",
    "shape",
    "format",
    "max|w|",
    "shift",
    "misfits",
    "max error",
    "rel. error",
    "upper B",
    "lower B",
    "reason",
)


def _row(layer: LayerReport) -> tuple[str, ...]:
    return (
        layer.name,
        "x".join(map(str, layer.shape)),
        "unsplit" if layer.fmt is None else layer.fmt.value,
        f"{layer.max_abs:.4g}",
        f"{layer.shift_min}..{layer.shift_max}",
        f"{layer.misfits:,}",
        f"{layer.max_abs_error:.2g}",
        f"{layer.max_rel_error:.2g}",
        f"{layer.upper_bytes:,}",
        f"{layer.lower_bytes:,}",
        layer.reason,
    )
