"""Which blocks are full precision throughout."""

import math

from hypothesis import given
from hypothesis import strategies as st

from dps_ray.modes import Mode
from dps_ray.scheduling.block_precision import BlockPrecision, Written, worth_noting

BLOCK_TOKENS = 4


def test_a_block_given_out_is_not_full_before_a_full_step_has_written_it() -> None:
    precision = BlockPrecision()
    precision.given_out([3])
    assert not precision.is_full(3)
    precision.note_step(Mode.FULL, [Written([3], None)])
    assert precision.is_full(3)


def test_a_block_half_written_in_fast_mode_is_never_full() -> None:
    precision = BlockPrecision()
    precision.given_out([3])
    precision.note_step(Mode.FAST, [Written([3], None)])
    precision.note_step(Mode.FULL, [Written([3], [3])])
    assert not precision.is_full(3)
    precision.given_out([3])
    precision.note_step(Mode.FULL, [Written([3], None)])
    assert precision.is_full(3)


def test_block_after_a_fast_one_in_any_group_of_layers_is_not_full() -> None:
    precision = BlockPrecision()
    precision.given_out([3, 4, 5, 6])
    precision.note_step(Mode.FAST, [Written([3, 4], None)])
    precision.note_step(Mode.FULL, [Written([5, 6], [4])])
    assert not precision.is_full(5)
    assert not precision.is_full(6)


def test_block_after_tokens_that_every_group_has_dropped_is_not_full() -> None:
    precision = BlockPrecision()
    precision.given_out([3])
    precision.note_step(Mode.FULL, [Written([3], [])])
    assert not precision.is_full(3)


def test_precision_follows_a_moved_block() -> None:
    precision = BlockPrecision()
    precision.given_out([3, 4, 9])
    precision.note_step(Mode.FULL, [Written([3], None)])
    precision.note_step(Mode.FAST, [Written([4], None)])
    precision.moved(3, 9)
    assert precision.is_full(9)
    precision.moved(4, 9)
    assert not precision.is_full(9)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(list(Mode)), st.integers(1, 6)), min_size=1, max_size=12
    )
)
def test_full_blocks_are_those_before_the_first_fast_token(steps: list[tuple[Mode, int]]) -> None:
    precision = BlockPrecision()
    blocks: list[int] = []
    modes: list[Mode] = []
    for mode, tokens in steps:
        start = len(modes)
        modes += [mode] * tokens
        needed = -(-len(modes) // BLOCK_TOKENS)
        fresh = list(range(100 + len(blocks), 100 + needed))
        precision.given_out(fresh)
        blocks += fresh
        previous = [blocks[(start - 1) // BLOCK_TOKENS]] if start else None
        precision.note_step(mode, [Written(blocks[start // BLOCK_TOKENS :], previous)])
    first_fast = modes.index(Mode.FAST) if Mode.FAST in modes else len(modes)
    for index, block in enumerate(blocks):
        held = min((index + 1) * BLOCK_TOKENS, len(modes))
        assert precision.is_full(block) == (held <= first_fast)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(list(Mode)), st.integers(1, 12)), min_size=1, max_size=12
    )
)
def test_what_goes_on_in_begun_blocks_changes_no_mark(steps: list[tuple[Mode, int]]) -> None:
    """Two groups of layers, of different block sizes; every step is told, or those that count."""
    told, spared = BlockPrecision(), BlockPrecision()
    sizes = (BLOCK_TOKENS, 6)
    tables: tuple[list[int], ...] = ([], [])
    start = 0
    for mode, tokens in steps:
        end = start + tokens
        written: list[int] = []
        previous: list[int] = []
        for group, (size, table) in enumerate(zip(sizes, tables, strict=True)):
            fresh = [1000 * group + index for index in range(len(table), -(-end // size))]
            for precision in (told, spared):
                precision.given_out(fresh)
            table += fresh
            written += table[start // size :]
            previous += table[(start - 1) // size :][:1] if start else []
        step = [Written(written, previous if start else None)]
        told.note_step(mode, step)
        if list(worth_noting(mode, [("a", start)], {"a": tokens}, math.gcd(*sizes))):
            spared.note_step(mode, step)
        start = end
        blocks = [*tables[0], *tables[1]]
        assert [told.is_full(b) for b in blocks] == [spared.is_full(b) for b in blocks]


def test_all_but_a_full_step_within_a_begun_block_is_worth_noting() -> None:
    starts = [("within", 5), ("beyond", 5), ("begins", 4)]
    tokens = {"within": 3, "beyond": 4, "begins": 1}
    assert list(worth_noting(Mode.FULL, starts, tokens, 4)) == starts[1:]
    assert list(worth_noting(Mode.FAST, starts, tokens, 4)) == starts
