"""Row ranges small enough that per-chunk temporaries stay in cache, whatever the layer's size."""

from collections.abc import Iterator

CHUNK_ELEMENTS = 1 << 18


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Cut ``rows`` rows of ``columns`` elements into slices of about ``CHUNK_ELEMENTS``."""
    step = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
