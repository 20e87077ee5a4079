"""A policy at work: filters, then weighted scorers, then a picker."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.columns import Columns
from dps_ray.fleet.decision import Decision, Line, Matches, Spots
from dps_ray.fleet.filters import Filter
from dps_ray.fleet.pickers import Picker, Probe
from dps_ray.fleet.scorers import Scorer
from dps_ray.fleet.tiers import FloatArray, TierArray, Tiers
from dps_ray.modes import Floor


@dataclass(frozen=True, slots=True)
class _Static:
    """What holds for every request of one floor until the columns change."""

    tiers: Tiers
    verdicts: tuple[tuple[str, TierArray], ...]
    lines: tuple[Line, ...]
    bases: FloatArray
    """Sums over all lines, also of those that say nothing of most requests: they are the same for
    every replica then."""
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
        static = self._static(columns, ask)
        costs, spots = self._costs(static, columns, ask, matches)
        rows = self._picker.pick(static.tiers, costs, limit, self._rng)
        probed = self._probe.choose(static.tiers, self._rng) if ask.floor is Floor.ANY else None
        if probed is not None:
            rows = np.concatenate(([probed], rows[rows != probed]))[:limit]
        ids = columns.ids
        return Decision(
            order=tuple([ids[row] for row in rows.tolist()]),
            probe=probed is not None,
            candidates=ids,
            tiers=static.tiers.levels,
            verdicts=static.verdicts,
            lines=static.lines,
            spots=spots,
            open_requests=columns.open_requests.copy(),
        )

    def costs(self, columns: Columns, ask: Ask, matches: Matches) -> tuple[TierArray, FloatArray]:
        """Tier of every candidate, and its cost up to what all candidates have in common."""
        static = self._static(columns, ask)
        return static.tiers.levels, self._costs(static, columns, ask, matches)[0]

    def _costs(
        self, static: _Static, columns: Columns, ask: Ask, matches: Matches
    ) -> tuple[FloatArray, dict[str, Spots]]:
        costs = static.slopes * columns.open_requests
        costs += static.bases
        found = {}
        for line in static.lines:
            spots = line.spots(ask, matches)
            if spots is not None:
                costs[spots.rows] += line.weight * spots.changes
                found[line.scorer] = spots
        return costs, found

    def _static(self, columns: Columns, ask: Ask) -> _Static:
        if self._kept_for != (columns, columns.version):
            self._kept_for = (columns, columns.version)
            self._kept = {}
        kept = self._kept.get(ask.floor)
        if kept is None:
            levels = np.zeros(len(columns), dtype=np.int8)
            verdicts = tuple((rule.name, rule.tiers(columns, ask)) for rule in self._filters)
            for _, found in verdicts:
                np.maximum(levels, found, out=levels)
            tiers = Tiers(levels)
            lines = tuple(scorer.line(columns, tiers) for scorer in self._scorers)
            bases, slopes = np.zeros(len(columns)), np.zeros(len(columns))
            for line in lines:
                bases += line.weight * line.base
                if line.slope is not None:
                    slopes += line.weight * line.slope
            kept = self._kept[ask.floor] = _Static(tiers, verdicts, lines, bases, slopes)
        return kept
