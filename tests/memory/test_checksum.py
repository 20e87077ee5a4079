"""What the checksum finds."""

import numpy as np
import pytest
from dps_kernels import row_sums
from dps_kernels.checksum import mixed
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.memory.checksum import checksum64, copy_checksum64

contents = st.binary(min_size=1, max_size=20_000).map(lambda raw: np.frombuffer(raw, np.uint8))


@given(contents, st.data())
def test_any_changed_byte_changes_the_checksum(
    content: np.ndarray[tuple[int], np.dtype[np.uint8]], data: st.DataObject
) -> None:
    changed = content.copy()
    changed[data.draw(st.integers(0, content.size - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum64(changed) != checksum64(content)


def test_no_two_flipped_bits_cancel_each_other() -> None:
    content = np.random.default_rng(6).integers(0, 256, 4 * 4096, dtype=np.uint8)
    words, whole = content.view(np.uint64), checksum64(content)
    changes = set[int]()
    for word in range(0, words.size, 9):
        for bit in range(64):
            words[word] ^= np.uint64(1 << bit)
            changes.add((checksum64(content) - whole) % 2**64)
            words[word] ^= np.uint64(1 << bit)
    assert len(changes) == 64 * len(range(0, words.size, 9))
    assert changes.isdisjoint({-change % 2**64 for change in changes})


def test_swapped_words_rows_and_chunks_change_the_checksum() -> None:
    content = np.random.default_rng(3).integers(0, 256, 64 << 10, dtype=np.uint8)
    for size in (8, 4096, 16384):
        pieces = content.reshape(-1, size).copy()
        pieces[[0, 1]] = pieces[[1, 0]]
        assert checksum64(pieces.reshape(-1)) != checksum64(content)


def test_the_value_is_the_documented_sum() -> None:
    row_of_one = np.zeros(4096 * 3, dtype=np.uint8)
    row_of_one[4096 + 8] = 1
    doubled = row_of_one * 2
    assert checksum64(row_of_one) % 2 == 1
    assert checksum64(doubled) == 2 * checksum64(row_of_one) % 2**64
    assert checksum64(row_of_one[: 4096 + 16]) == checksum64(row_of_one)


def test_shares_of_pieces_add_up_to_the_checksum_of_the_whole() -> None:
    data = np.random.default_rng(3).integers(0, 256, 5 * 4096 + 1000, dtype=np.uint8)
    for rows in (1, 2, 3, 8):
        piece = rows * 4096
        shares = [
            checksum64(data[start : start + piece], start // 4096)
            for start in range(0, data.size, piece)
        ]
        assert sum(shares) % (1 << 64) == checksum64(data)


def test_the_compiled_rows_are_numpys() -> None:
    words = np.random.default_rng(4).integers(0, 1 << 64, (7, 512), dtype=np.uint64)
    assert (row_sums(words, words[0].copy()) == mixed(words) @ words[0]).all()


@pytest.mark.parametrize("offset", [0, 16, 24])
def test_copied_rows_arrive_and_are_summed_wherever_the_target_begins(offset: int) -> None:
    """Whole cache lines of the target are written past the caches; a target between them is not."""
    source = np.random.default_rng(5).integers(0, 256, 9 * 4096, dtype=np.uint8)
    around = np.full(source.size + 256, 7, dtype=np.uint8)
    start = -around.ctypes.data % 64 + offset
    target = around[start : start + source.size]
    assert copy_checksum64(target, source, 4) == checksum64(source, 4)
    assert (target == source).all()
    assert (np.delete(around, slice(start, start + source.size)) == 7).all()
