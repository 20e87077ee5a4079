"""The part of an engine's status page that one rank writes, as cells of float64."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_UNITS = 1024
MAX_LAYERS = 512
_RANK_FIELDS = (
    "base_blocks",
    "elastic_blocks",
    "blocks_per_unit",
    "units",
    "unit_bytes",
    "layers",
    "restored_bytes",
    "restore_busy_s",
    "restore_bytes_per_s",
    "resumed_bytes",
    "restores_failed",
    "backup_bytes",
    "fast_steps",
    "full_steps",
)
_PLACE = {name: place for place, name in enumerate(_RANK_FIELDS)}
_ERROR_BYTES = 160
_BOUNDS_START = len(_RANK_FIELDS) + MAX_UNITS
_ERROR_START = _BOUNDS_START + 2 * MAX_LAYERS
RANK_CELLS = _ERROR_START + _ERROR_BYTES // 8


class RankSection:
    """What one rank tells the scheduler: geometry, counters, the last restore of each unit, why one
    failed, and, where layers return one by one, where their residual lies."""

    def __init__(self, cells: NDArray[np.float64]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> float:
        return float(self._cells[_PLACE[name]])

    def __setitem__(self, name: str, value: float) -> None:
        self._cells[_PLACE[name]] = value

    @property
    def outcomes(self) -> NDArray[np.float64]:
        """Per unit, the epoch of its latest finished restore; negative when that restore failed."""
        return self._cells[len(_RANK_FIELDS) : _BOUNDS_START]

    @property
    def error(self) -> str:
        """Why the rank's latest failed restore did not succeed; empty before the first."""
        text = self._cells[_ERROR_START:].tobytes().rstrip(b"\0")
        return text.decode(errors="ignore")

    @error.setter
    def error(self, text: str) -> None:
        content = text.encode()[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
        self._cells[_ERROR_START:] = np.frombuffer(content, dtype=np.float64)

    @property
    def layer_bounds(self) -> list[tuple[int, int]]:
        """Start and end of each layer's residual, bytes; empty where all of them return at once."""
        cells = self._cells[_BOUNDS_START:_ERROR_START].astype(int).tolist()
        count = int(self["layers"])
        return list(zip(cells[:count], cells[MAX_LAYERS : MAX_LAYERS + count], strict=True))

    @layer_bounds.setter
    def layer_bounds(self, bounds: Sequence[tuple[int, int]]) -> None:
        count = len(bounds)
        starts, ends = _BOUNDS_START, _BOUNDS_START + MAX_LAYERS
        self._cells[starts : starts + count] = [start for start, _ in bounds]
        self._cells[ends : ends + count] = [end for _, end in bounds]
        self["layers"] = count
