"""Readings of a fleet over time, and what its counters say about a stretch of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from dps_ray.fleet.state import ReplicaState
from dps_ray.modes import Mode


@dataclass(frozen=True)
class FleetSample:
    """What the controller said about every replica at one moment."""

    time_s: float
    """Seconds after the start of the replay; negative before it."""
    states: dict[str, ReplicaState]
    """Latest state by replica id; replicas that were never heard are left out."""


def parse_status(status: dict[str, Any], time_s: float) -> FleetSample:
    """Read the controller's ``GET /dps/status`` answer."""
    states = {
        entry["replica_id"]: ReplicaState.model_validate(entry["state"])
        for entry in status["replicas"]
        if entry["state"] is not None
    }
    return FleetSample(time_s, states)


def replica_ids(samples: Sequence[FleetSample]) -> list[str]:
    """Replicas in order of first appearance."""
    seen: dict[str, None] = {}
    for sample in samples:
        seen.update(dict.fromkeys(sample.states))
    return list(seen)


def track(samples: Sequence[FleetSample], replica_id: str) -> list[tuple[float, ReplicaState]]:
    """One replica's states with their times, seconds."""
    return [
        (sample.time_s, sample.states[replica_id])
        for sample in samples
        if replica_id in sample.states
    ]


def growth(samples: Sequence[FleetSample], counter: str) -> float:
    """How much a counter grew between first and last sample, summed over the replicas.

    Parameters
    ----------
    samples
        Readings in order of time.
    counter
        Field of ``ReplicaState`` that only grows. A reading of ``None`` is skipped.
    """
    total = 0.0
    for replica_id in replica_ids(samples):
        values = [getattr(state, counter) for _, state in track(samples, replica_id)]
        known = [float(value) for value in values if value is not None]
        if known:
            total += known[-1] - known[0]
    return total


def mode_spans(samples: Sequence[FleetSample], replica_id: str) -> list[tuple[float, float, Mode]]:
    """Stretches of one mode as ``(start_s, end_s, mode)``, to the sampling period."""
    spans: list[tuple[float, float, Mode]] = []
    for time_s, state in track(samples, replica_id):
        if state.mode is None:
            continue
        if spans:
            start_s, _, mode = spans[-1]
            spans[-1] = (start_s, time_s, mode)
        if not spans or spans[-1][2] is not state.mode:
            spans.append((time_s, time_s, state.mode))
    return spans


def occupancy(samples: Sequence[FleetSample]) -> dict[str, Any] | None:
    """KV blocks in use over time, for ``dps-ray tune``; ``None`` where they were never told."""
    tracks = [
        [
            (time_s, state)
            for time_s, state in track(samples, replica_id)
            if None not in (state.used_blocks, state.base_blocks, state.total_blocks)
        ]
        for replica_id in replica_ids(samples)
    ]
    tracks = [known for known in tracks if len(known) > 1]
    if not tracks:
        return None
    gaps_s = [after[0] - before[0] for known in tracks for before, after in pairwise(known)]
    shape = tracks[0][0][1]
    return {
        "period_s": median(gaps_s),
        "base_blocks": shape.base_blocks,
        "total_blocks": shape.total_blocks,
        "used_blocks": [[state.used_blocks for _, state in known] for known in tracks],
    }


def precision_summary(samples: Sequence[FleetSample]) -> dict[str, Any]:
    """Elastic-memory figures of a replay, summed over the replicas; JSON-ready."""
    tokens_full, tokens_fast = growth(samples, "tokens_full"), growth(samples, "tokens_fast")
    tokens = tokens_full + tokens_fast
    restored_bytes = growth(samples, "restored_bytes")
    busy_s = growth(samples, "restore_busy_s")
    latest = samples[-1].states.values() if samples else ()
    restores_s = [state.last_restore_s for state in latest if state.last_restore_s is not None]
    return {
        "tokens_full": int(tokens_full),
        "tokens_fast": int(tokens_fast),
        "share_full_precision": tokens_full / tokens if tokens else None,
        "switches_to_fast": int(growth(samples, "switches_to_fast")),
        "switches_to_full": int(growth(samples, "switches_to_full")),
        "preemptions": int(growth(samples, "preemptions")),
        "restored_bytes": int(restored_bytes),
        "restore_busy_s": busy_s,
        "restore_gb_per_s": restored_bytes / busy_s / 1e9 if busy_s > 0 else None,
        "last_restore_s": max(restores_s, default=None),
        "occupancy": occupancy(samples),
    }
