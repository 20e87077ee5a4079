"""Which graphs are captured when."""

from dps_ray.engine.graph_book import GraphBook


def test_eager_book_expects_every_graph_at_start_and_misses_none() -> None:
    book = GraphBook[str]("eager")
    assert book.due_at_start(of_start_mode=True)
    assert book.due_at_start(of_start_mode=False)
    assert book.has("any")
    assert book.missed() == ()


def test_lazy_book_remembers_each_miss_once_until_its_capture_begins() -> None:
    book = GraphBook[str]("lazy")
    assert book.due_at_start(of_start_mode=True)
    assert not book.due_at_start(of_start_mode=False)
    assert [book.has(name) for name in ("b", "a", "b")] == [False, False, False]
    assert book.missed() == ("b", "a")
    book.add("b")
    assert book.has("b")
    assert book.missed() == ("a",)
    book.clear()
    assert not book.has("b")
