"""A 64-bit checksum that runs near memory speed on a host and needs only integer sums on a GPU.

The bytes are read as rows of 512 little-endian 64-bit words, the last row filled up with zeros;
the checksum is ``sum(row_weight[r] * column_weight[c] * mixed(word[r, c]))`` modulo 2**64, with
``mixed(word) = word ^ (word >> 29)``. All weights are odd and the mixing can be undone: a change
within one word is always found. Weights differ, so words in the wrong place and changes of several
words are nearly always found. Without the mixing two flipped top bits would always cancel each
other, whatever the weights; with it, two flipped bits do so about once in 2**29 pairs of words.

The sum of a piece is the sum over its rows, so bytes can be summed piece by piece while they are
still in the cache. The compiled kernels sum rows some three times as fast as NumPy; either releases
the interpreter lock meanwhile.
"""

import numpy as np
from dps_kernels import copy_rows, row_sums
from numpy.typing import NDArray

COLUMNS = 512
ROW_BYTES = 8 * COLUMNS


def _odd_weights(start: int, count: int) -> NDArray[np.uint64]:
    """Weights ``start ... start + count`` of a fixed sequence (SplitMix64, made odd)."""
    state = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    state *= np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


def column_weights() -> NDArray[np.uint64]:
    """The weight of each word of a row."""
    return _odd_weights(0, COLUMNS)


def row_weights(count: int, first: int = 0) -> NDArray[np.uint64]:
    """The weights of ``count`` rows from row ``first`` on."""
    global _known_row_weights
    if first + count > _known_row_weights.size:
        _known_row_weights = _odd_weights(COLUMNS, first + count)
    return _known_row_weights[first : first + count]


_COLUMN_WEIGHTS = column_weights()
_known_row_weights = _odd_weights(COLUMNS, 0)


def checksum64(data: NDArray[np.uint8], first_row: int = 0) -> int:
    """Checksum of contiguous bytes, or one piece's share in it.

    Parameters
    ----------
    data
        1-D uint8, contiguous, of any length; trailing zeros within the last 4096-byte row do not
        count.
    first_row
        Row at which the piece begins. The shares of all pieces add up, modulo 2**64, to the
        checksum of the whole.
    """
    whole = data.size // ROW_BYTES * ROW_BYTES
    rows = row_sums(data[:whole].view(np.uint64).reshape(-1, COLUMNS), _COLUMN_WEIGHTS)
    if whole < data.size:
        last = np.zeros(ROW_BYTES, dtype=np.uint8)
        last[: data.size - whole] = data[whole:]
        rows = np.append(rows, row_sums(last.view(np.uint64).reshape(1, -1), _COLUMN_WEIGHTS))
    return int(rows @ row_weights(rows.size, first_row))


def copy_checksum64(
    target: NDArray[np.uint8], source: NDArray[np.uint8], first_row: int = 0
) -> int:
    """Copy whole rows of contiguous bytes; the share of what was stored, as ``checksum64`` has it.

    Parameters
    ----------
    target, source
        1-D uint8, contiguous, equally long, a multiple of ``ROW_BYTES``.
    first_row
        Row at which the piece begins.
    """
    target_rows, source_rows = (
        data.view(np.uint64).reshape(-1, COLUMNS) for data in (target, source)
    )
    rows = copy_rows(target_rows, source_rows, _COLUMN_WEIGHTS)
    return int(rows @ row_weights(rows.size, first_row))
