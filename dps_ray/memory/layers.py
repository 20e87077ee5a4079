"""Which residual bytes make up a layer of the model."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from dps_ray.memory.arena import Entry

_LAYER = re.compile(r".*?\.\d+(?=\.|$)")
"""Name of a weight up to its first number: ``model.layers.12.mlp.down_proj``."""


@dataclass(frozen=True, slots=True)
class LayerResidual:
    """Residual bytes of one layer: neighbours in the residual address range."""

    name: str
    start: int
    """First byte, as an offset in the range."""
    end: int
    """One past the last byte."""
    offsets: tuple[int, ...]
    """Where each of its weights begins."""


def layers_of(entries: Iterable[Entry]) -> tuple[LayerResidual, ...]:
    """Group weights by the layer in their names, in the order of their offsets.

    A weight outside of any numbered layer is a layer of its own. A layer whose weights are not
    neighbours counts as several.
    """
    layers = []
    for name, group in groupby(entries, key=lambda entry: _layer_name(entry.name)):
        members = list(group)
        layers.append(
            LayerResidual(
                name=name,
                start=members[0].offset,
                end=members[-1].offset + members[-1].nbytes,
                offsets=tuple(entry.offset for entry in members),
            )
        )
    return tuple(layers)


def _layer_name(weight: str) -> str:
    found = _LAYER.match(weight)
    return found.group() if found else weight
