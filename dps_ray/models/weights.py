"""Seeded weights with the statistics that decide a layer's nested format.

Linear weights are normal with variance ``1 / in_features``, so activations keep their scale and
every value is far below 1. Two layers of each model then get what real checkpoints have in a few
places: whole output rows that are large, and single huge values in ordinary rows.
"""

import zlib
from dataclasses import dataclass

import torch

from dps_ray.models.architectures import Parameter, Role

ROW_FLOOR = 2.0**-8
"""Smallest magnitude in an enlarged row: an exact power-of-two shift of the row then loses no bit
of a float16 value."""


@dataclass(frozen=True)
class Outliers:
    """Names of the parameters that get outliers, as suffixes of the checkpoint name."""

    rows: tuple[str, ...]
    """Two output rows reach magnitudes of 2 to 20, no value in them is tiny: e4m3 cannot hold
    them, one shift per row can."""
    spots: tuple[str, ...]
    """Four single values of 20 to 90 in two ordinary rows: no shift of such a row is exact, so only
    the wide-range format holds them."""


def draw(parameter: Parameter, outliers: Outliers, seed: int) -> torch.Tensor:
    """Draw one tensor, float32; the same ``seed`` and name give the same values."""
    generator = torch.Generator().manual_seed(zlib.crc32(parameter.name.encode()) ^ seed)
    noise = torch.randn(parameter.shape, generator=generator)
    match parameter.role:
        case Role.NORM:
            return 1.0 + 0.05 * noise
        case Role.BIAS:
            return 0.05 * noise
        case Role.ROUTER_BIAS:
            return 0.01 * noise
        case Role.EMBEDDING:
            return 0.5 * noise
        case Role.HEAD:
            # Logits with a standard deviation of about 3: samplers see a peaked distribution.
            return 3.0 * noise / parameter.shape[1] ** 0.5
        case Role.LINEAR:
            weight = noise / parameter.shape[1] ** 0.5
    if parameter.name.endswith(outliers.rows):
        _enlarge_rows(weight)
    if parameter.name.endswith(outliers.spots):
        _plant_spots(weight)
    return weight


def _enlarge_rows(weight: torch.Tensor) -> None:
    """Scale one row of either half of the output features, so that both ranks of TP=2 have one."""
    half = weight.shape[0] // 2
    for row, standard_deviation in ((3, 1.0), (half + 3, 4.0)):
        weight[row] *= standard_deviation * weight.shape[1] ** 0.5
        sign = torch.where(weight[row] < 0, -1.0, 1.0)
        weight[row] = sign * weight[row].abs().clamp(min=ROW_FLOOR)


def _plant_spots(weight: torch.Tensor) -> None:
    """Set one value in each quadrant, so that row and column shards of TP=2 all have some."""
    half_out, half_in = weight.shape[0] // 2, weight.shape[1] // 2
    for row, column, value in ((5, 7, 23.0), (5, 7 + half_in, -61.5)):
        weight[row, column] = value
        weight[row + half_out, column] = -value * 1.375
