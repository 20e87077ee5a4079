"""How long a caller that is not answered waits before it calls again."""

import random
from collections.abc import Callable


class Backoff:
    """Waits that double up to a bound, drawn so that callers who failed together come apart.

    Each wait lies between half of its step and all of it. Without that, and with a fixed wait, a
    thousand callers of a controller that was slow once keep calling it at once, and it never is in
    time again.

    Parameters
    ----------
    first_s
        First step, seconds.
    longest_s
        Last step, seconds; not below ``first_s``.
    draw
        Uniform numbers from 0 to 1.
    """

    def __init__(
        self, first_s: float, longest_s: float, draw: Callable[[], float] = random.random
    ) -> None:
        if not 0.0 < first_s <= longest_s:
            raise ValueError(
                f"first_s is {first_s:g} and longest_s is {longest_s:g}: give a first wait above 0 "
                "and a longest one that is not below it"
            )
        self._first_s = self._step_s = first_s
        self._longest_s = longest_s
        self._draw = draw

    def failed(self) -> float:
        """How long to wait after one more call that was not answered, seconds."""
        step_s = self._step_s
        self._step_s = min(2.0 * step_s, self._longest_s)
        return step_s * (1.0 + self._draw()) / 2.0

    def succeeded(self) -> None:
        """Begin with the first step again."""
        self._step_s = self._first_s
