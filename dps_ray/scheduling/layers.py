"""Which layers can run in full precision while part of the residual is still missing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from dps_ray.modes import Mode
from dps_ray.scheduling.ledger import UnitLedger


@dataclass(frozen=True, slots=True)
class LayerSegments:
    """For each layer of the model, the first and the last residual segment that it has bytes in.

    Neighbouring layers may share a segment, and a segment may hold several layers.
    """

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def cut(cls, bounds_bytes: Sequence[tuple[int, int]], segment_bytes: int) -> Self:
        """Find each layer's segments.

        Parameters
        ----------
        bounds_bytes
            Start and end of each layer's bytes, as offsets in the residual address range.
        segment_bytes
            Bytes of one segment.
        """
        return cls(
            tuple(
                (start // segment_bytes, (end - 1) // segment_bytes) for start, end in bounds_bytes
            )
        )

    def complete(self, missing: Iterable[int]) -> tuple[int, ...]:
        """Return the layers that have no byte in a missing segment, in order.

        The fewer segments are missing, the more layers are complete: while nothing is lent, a
        layer that is complete stays so.
        """
        gone = set(missing)
        return tuple(
            layer
            for layer, (first, last) in enumerate(self.spans)
            if gone.isdisjoint(range(first, last + 1))
        )


class LayerReturn:
    """Says for each step which layers run in full precision although the step is a fast one.

    Parameters
    ----------
    segments
        Where the layers' residual lies; ``None``: no layer returns ahead of the others.
    ledger
        The engine's own.
    """

    def __init__(self, segments: LayerSegments | None, ledger: UnitLedger) -> None:
        self._segments = segments
        self._ledger = ledger
        self.count = len(segments.spans) if segments is not None else 0
        """Layers that return one by one; 0 where all return at once."""
        self.count_full = 0
        """How many of them run in full precision in the latest planned step."""

    def plan_step(self, mode: Mode, heading: Mode) -> tuple[int, ...]:
        """Choose the layers of the coming step, once its lends have been made.

        There are some only on the way back: a burst is served fast. A layer that loses a unit is
        fast in the very step whose command zeroes that unit.

        Parameters
        ----------
        mode
            Mode of the coming step.
        heading
            Mode that the replica is on its way to.

        Returns
        -------
        tuple
            ``StepCommand.full_layers``.
        """
        if self._segments is None or mode is Mode.FULL or heading is Mode.FAST:
            self.count_full = self.count if mode is Mode.FULL else 0
            return ()
        full = self._segments.complete(self._ledger.missing_segments())
        self.count_full = len(full)
        return full
