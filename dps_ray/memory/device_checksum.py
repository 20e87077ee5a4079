"""``checksum64`` in torch operations, for bytes that lie on a device."""

import numpy as np
import torch
from dps_kernels.checksum import MIX_SHIFT
from numpy.typing import NDArray

from dps_ray.memory.checksum import COLUMNS, ROW_BYTES, column_weights, row_weights

_SHIFTED_BITS = (1 << 64 - MIX_SHIFT) - 1
_ROWS_AT_ONCE = 1024
"""Bounds the scratch memory to 4 MiB, which a GPU keeps in its second-level cache."""


class DeviceChecksum:
    """Sums device bytes where they lie, in scratch memory taken once.

    Integer operations wrap in torch, so signed words give the same sum modulo 2**64. Operations
    go to the current stream. Not thread-safe: the scratch is shared.

    Parameters
    ----------
    device
        Where the bytes and the scratch lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._columns = self._upload(column_weights())
        self._row_weights = self._upload(row_weights(_ROWS_AT_ONCE))
        self._products = torch.empty((_ROWS_AT_ONCE, COLUMNS), dtype=torch.int64, device=device)
        self._row_sums = torch.empty(_ROWS_AT_ONCE, dtype=torch.int64, device=device)
        self._last_row = torch.empty(ROW_BYTES, dtype=torch.uint8, device=device)
        self._chunk_sum = torch.empty((), dtype=torch.int64, device=device)
        self._total = torch.empty((), dtype=torch.int64, device=device)

    def __call__(self, data: torch.Tensor) -> int:
        """Checksum of 1-D uint8 bytes that start on an 8-byte boundary; waits for the result."""
        whole = data.numel() // ROW_BYTES * ROW_BYTES
        self._need_rows(-(-data.numel() // ROW_BYTES))
        self._total.zero_()
        rows = data[:whole].view(torch.int64).view(-1, COLUMNS)
        for first in range(0, rows.shape[0], _ROWS_AT_ONCE):
            self._add(rows[first : first + _ROWS_AT_ONCE], first)
        if whole < data.numel():
            self._last_row.zero_()
            self._last_row[: data.numel() - whole].copy_(data[whole:])
            self._add(self._last_row.view(torch.int64).view(1, COLUMNS), rows.shape[0])
        return int(self._total.item()) % (1 << 64)

    def _add(self, rows: torch.Tensor, first: int) -> None:
        count = rows.shape[0]
        row_sums = self._row_sums[:count]
        products = self._products[:count]
        torch.bitwise_right_shift(rows, MIX_SHIFT, out=products)
        # The shift repeats the sign, which unsigned words do not have.
        products.bitwise_and_(_SHIFTED_BITS).bitwise_xor_(rows).mul_(self._columns)
        torch.sum(products, dim=1, out=row_sums)
        row_sums.mul_(self._row_weights[first : first + count])
        torch.sum(row_sums, dim=0, out=self._chunk_sum)
        self._total.add_(self._chunk_sum)

    def _need_rows(self, count: int) -> None:
        if count > self._row_weights.numel():
            self._row_weights = self._upload(row_weights(count))

    def _upload(self, weights: NDArray[np.uint64]) -> torch.Tensor:
        return torch.from_numpy(weights.view(np.int64)).to(self._device)
