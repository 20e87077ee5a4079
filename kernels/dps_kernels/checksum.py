"""Weighted sums of 64-bit words, row by row: the inner loop of a checksum."""

import numpy as np
import torch
from numpy.typing import NDArray

from dps_kernels.library import available


def row_sums(words: NDArray[np.uint64], weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``words @ weights`` modulo 2**64, in the calling thread and without the interpreter lock.

    Parameters
    ----------
    words
        ``[rows, columns]``, contiguous.
    weights
        ``[columns]``.

    Returns
    -------
    ``[rows]`` uint64
    """
    if not available() or not words.size:
        return words @ weights
    sums = np.empty(words.shape[0], dtype=np.uint64)
    torch.ops.dps_kernels.row_sums(
        torch.from_numpy(words.view(np.int64)),
        torch.from_numpy(weights.view(np.int64)),
        torch.from_numpy(sums.view(np.int64)),
    )
    return sums
