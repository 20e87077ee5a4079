"""Calls of a driver API: each is written down, some are refused, and what they took is counted."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as real

OK = real.CUresult.CUDA_SUCCESS


class RecordedCalls:
    """What all calls of a played driver have in common."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        """Name and arguments of each, in order."""
        self.live: dict[str, set[Any]] = defaultdict(set)
        """What was taken and not given back, by kind."""
        self.refusals: dict[tuple[str, int], real.CUresult] = {}
        """Refuse the n-th call (from 0) of a name."""
        self.ids = itertools.count(0x100)
        """Values for handles."""
        self.lock = threading.RLock()
        self._counts: Counter[str] = Counter()

    def refuse(self, name: str, nth: int = 0, status: str = "CUDA_ERROR_UNKNOWN") -> None:
        """Refuse the ``nth`` call of ``name`` from now on."""
        self.refusals[name, self._counts[name] + nth] = getattr(real.CUresult, status)

    def names(self) -> list[str]:
        """Names of all calls so far."""
        return [call[0] for call in self.calls]

    @property
    def leaks(self) -> dict[str, set[Any]]:
        """What is still held."""
        return {kind: things for kind, things in self.live.items() if things}

    def call(
        self,
        name: str,
        *arguments: Any,
        result: Callable[[], Any] | None = None,
        effect: Callable[[], object] | None = None,
    ) -> tuple[Any, ...]:
        """Note a call and, unless it is refused, have its effect; status and result, as CUDA's."""
        with self.lock:
            self.calls.append((name, *arguments))
            refused = self.refusals.pop((name, self._counts[name]), None)
            self._counts[name] += 1
            if refused is not None:
                return (refused,) if result is None else (refused, None)
            if effect is not None:
                effect()
            return (OK,) if result is None else (OK, result())

    def take(
        self, name: str, kind: str, *arguments: Any, make: Callable[[int], Any] = int
    ) -> tuple[Any, ...]:
        """Call for a new thing of a kind, which is live from then on."""

        def take() -> Any:
            value = next(self.ids)
            self.live[kind].add(value)
            return make(value)

        return self.call(name, *arguments, result=take)

    def drop(self, name: str, kind: str, value: int) -> tuple[Any, ...]:
        """Call to end a thing; it must be live."""
        return self.call(name, value, effect=lambda: self.live[kind].remove(value))
