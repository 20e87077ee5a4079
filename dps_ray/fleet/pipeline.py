"""A policy at work: filters, then weighted scorers, then a picker."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.columns import Columns, FloatArray, TierArray
from dps_ray.fleet.decision import Decision, Line
from dps_ray.fleet.filters import Filter
from dps_ray.fleet.pickers import Picker, Probe
from dps_ray.fleet.scorers import Matches, Scorer, SteadyScorer
from dps_ray.modes import Floor


@dataclass(frozen=True, slots=True)
class _Static:
    """What holds for every request of one floor until the columns change."""

    tiers: TierArray
    verdicts: tuple[tuple[str, TierArray], ...]
    lines: tuple[Line, ...]
    bases: FloatArray
    slopes: FloatArray


class Pipeline:
    """Decides for one router; keeps what does not change between two publications.

    Parameters
    ----------
    filters, scorers, picker
        The policy's parts.
    probe
        Share of requests that try an unknown replica.
    rng
        Breaks ties and draws probes.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        scorers: Sequence[Scorer],
        picker: Picker,
        probe: Probe,
        rng: np.random.Generator,
    ) -> None:
        self._filters = tuple(filters)
        self._scorers = tuple(scorer for scorer in scorers if scorer.weight > 0.0)
        self._steady = tuple(s for s in self._scorers if isinstance(s, SteadyScorer))
        self._live = tuple(s for s in self._scorers if not isinstance(s, SteadyScorer))
        self._picker = picker
        self._probe = probe
        self._rng = rng
        self._kept: dict[Floor, _Static] = {}
        self._kept_for: tuple[Columns, int] | None = None

    def decide(self, columns: Columns, ask: Ask, matches: Matches, *, limit: int) -> Decision:
        """Order the best ``limit`` replicas for one request.

        Parameters
        ----------
        columns
            All candidates.
        ask
            The request.
        matches
            Prefixes cached by replica.
        limit
            Most replicas in the answer.
        """
        static, costs, live = self._costs(columns, ask, matches)
        tiers = static.tiers
        rows = self._picker.pick(tiers, costs, limit, self._rng)
        probed = self._probe.choose(tiers, self._rng) if ask.floor is Floor.ANY else None
        if probed is not None:
            rows = np.concatenate(([probed], rows[rows != probed]))[:limit]
        ids = columns.ids
        return Decision(
            order=tuple(ids[row] for row in rows.tolist()),
            probe=probed is not None,
            candidates=ids,
            tiers=tiers,
            verdicts=static.verdicts,
            lines=(*static.lines, *live),
            open_requests=columns.open_requests.copy(),
        )

    def costs(self, columns: Columns, ask: Ask, matches: Matches) -> tuple[TierArray, FloatArray]:
        """Tier and cost of every candidate."""
        static, costs, _ = self._costs(columns, ask, matches)
        return static.tiers, costs

    def _costs(
        self, columns: Columns, ask: Ask, matches: Matches
    ) -> tuple[_Static, FloatArray, list[Line]]:
        static = self._static(columns, ask)
        costs = static.slopes * columns.open_requests
        costs += static.bases
        lines = []
        for scorer in self._live:
            values = scorer.values(columns, ask, static.tiers, matches)
            if values is not None:
                costs += scorer.weight * values
                lines.append(Line(scorer.name, scorer.weight, values))
        return static, costs, lines

    def _static(self, columns: Columns, ask: Ask) -> _Static:
        if self._kept_for != (columns, columns.version):
            self._kept_for = (columns, columns.version)
            self._kept = {}
        kept = self._kept.get(ask.floor)
        if kept is None:
            tiers = np.zeros(len(columns), dtype=np.int8)
            verdicts = tuple((rule.name, rule.tiers(columns, ask)) for rule in self._filters)
            for _, levels in verdicts:
                np.maximum(tiers, levels, out=tiers)
            bases, slopes = np.zeros(len(columns)), np.zeros(len(columns))
            lines = []
            for scorer in self._steady:
                base, slope = scorer.line(columns, tiers)
                bases += scorer.weight * base
                if slope is not None:
                    slopes += scorer.weight * slope
                lines.append(Line(scorer.name, scorer.weight, base, slope))
            kept = _Static(tiers, verdicts, tuple(lines), bases, slopes)
            self._kept[ask.floor] = kept
        return kept
