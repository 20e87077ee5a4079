"""A router's guess at who has which prefix cached."""

from dps_ray.fleet.prefixes import CHUNK_CHARS, PrefixIndex, prefix_hashes


def text(*chunks: str) -> str:
    return "".join(chunk * CHUNK_CHARS for chunk in chunks)


def test_equal_beginnings_have_equal_hashes_and_later_chunks_depend_on_earlier_ones() -> None:
    one, other = prefix_hashes(text("a", "b", "c")), prefix_hashes(text("a", "b", "x"))
    assert (one[:2], one[2] != other[2]) == (other[:2], True)
    assert prefix_hashes(text("x", "b"))[1] != one[1]


def test_rest_below_a_chunk_counts_for_nothing() -> None:
    assert prefix_hashes("a" * (CHUNK_CHARS - 1)) == ()
    assert len(prefix_hashes("a" * (2 * CHUNK_CHARS + 7))) == 2


def test_longest_prefix_counts_for_the_replica_that_got_it() -> None:
    index = PrefixIndex()
    index.note(prefix_hashes(text("a", "b")), "one")
    index.note(prefix_hashes(text("a", "b", "c", "d")), "two")
    index.note(prefix_hashes(text("a")), "one")
    assert index.matches(prefix_hashes(text("a", "b", "c", "d"))) == {"one": 0.25, "two": 1.0}
    assert index.matches(prefix_hashes(text("x", "b"))) == {}


def test_least_recently_used_chunks_are_forgotten() -> None:
    index = PrefixIndex(capacity=2)
    for letter in "abc":
        index.note(prefix_hashes(text(letter)), letter)
    assert index.matches(prefix_hashes(text("a"))) == {}
    assert index.matches(prefix_hashes(text("c"))) == {"c": 1.0}
