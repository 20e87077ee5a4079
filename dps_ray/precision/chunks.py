"""Row ranges small enough that temporaries do not grow with the layer."""

from collections.abc import Iterator

from torch import Tensor

CPU_ELEMENTS = 1 << 14
"""Chunk on a CPU: temporaries stay in cache, and torch runs each operation on one thread. A
fork and join for every one of these short operations costs more than it gains, and where other
processes hold a core it costs a hundred times more."""
DEVICE_ELEMENTS = 1 << 24
"""Chunk on an accelerator: long enough to hide the launches."""


def row_chunks(matrix: Tensor) -> Iterator[slice]:
    """Cut the rows of a 2-D tensor into slices of about one chunk of elements."""
    rows, columns = matrix.shape
    elements = CPU_ELEMENTS if matrix.device.type == "cpu" else DEVICE_ELEMENTS
    step = max(1, elements // columns)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
