"""Weighted sums of 64-bit words, row by row: the inner loop of a checksum."""

import numpy as np
import torch
from numpy.typing import NDArray

from dps_kernels.library import available, native

MIX_SHIFT = 29


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``word ^ (word >> 29)``: what a flipped upper bit changes, it also changes 29 bits lower."""
    return words ^ (words >> np.uint64(MIX_SHIFT))


def row_sums(words: NDArray[np.uint64], weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``mixed(words) @ weights`` modulo 2**64, in the calling thread, without the interpreter lock.

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
        return mixed(words) @ weights
    sums = np.empty(words.shape[0], dtype=np.uint64)
    native().row_sums(*map(_signed, (words, weights, sums)))
    return sums


def copy_rows(
    target: NDArray[np.uint64], source: NDArray[np.uint64], weights: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Copy ``source`` past the caches and return its weighted sums, taken between load and store.

    Parameters
    ----------
    target, source
        ``[rows, columns]``, contiguous; they do not overlap.
    weights
        ``[columns]``.

    Returns
    -------
    ``[rows]`` uint64
    """
    if not available() or not source.size:
        target[...] = source
        return mixed(target) @ weights
    sums = np.empty(source.shape[0], dtype=np.uint64)
    native().copy_rows(*map(_signed, (target, source, weights, sums)))
    return sums


def _signed(words: NDArray[np.uint64]) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int64))
