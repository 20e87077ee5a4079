"""Which CUDA graphs exist, when there is one set of them for each mode.

Eager: every graph of both modes is captured at start. Lazy: those of the mode the engine starts in;
a graph of the other one is captured after a step has missed it, before the next step. Both count
the memory of both sets when vLLM sizes its KV cache, so lazy capture never runs out of memory.
"""

from collections.abc import Hashable
from typing import Generic, Literal, TypeVar

Graph = TypeVar("Graph", bound=Hashable)

Capture = Literal["eager", "lazy"]


class GraphBook(Generic[Graph]):
    """Captured and missed graphs of one runner, by whatever names a graph there.

    All tensor-parallel ranks run the same steps, so their books never differ: they capture the
    same graphs at the same step, as the collectives inside a capture need it.
    """

    def __init__(self, capture: Capture) -> None:
        self._lazy = capture == "lazy"
        self._captured: set[Graph] = set()
        self._missed: dict[Graph, None] = {}

    def due_at_start(self, of_start_mode: bool) -> bool:
        """Whether a graph, of the mode the engine starts in or not, is captured at start."""
        return of_start_mode or not self._lazy

    def has(self, graph: Graph) -> bool:
        """Whether the step may run ``graph``; a lazy book remembers the miss."""
        if not self._lazy or graph in self._captured:
            return True
        self._missed[graph] = None
        return False

    def add(self, graph: Graph) -> None:
        """Record a graph whose capture begins: the capture itself looks it up."""
        self._captured.add(graph)
        self._missed.pop(graph, None)

    def missed(self) -> tuple[Graph, ...]:
        """Graphs that steps would have used, in the order of the first miss."""
        return tuple(self._missed)

    def clear(self) -> None:
        """Forget everything: profiling throws its graphs away."""
        self._captured.clear()
        self._missed.clear()
