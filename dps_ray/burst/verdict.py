"""What a fleet's size did in a burst: figures, checks, and lines for people."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from dps_autoscaling.scaler import ScalingOptions
from dps_autoscaling.steps import Step, hasty, steps_of, turns, unbounded

from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.bench.slo import percentiles
from dps_ray.burst.watch import Look
from dps_ray.report import Report


def judge(
    report: Report,
    looks: Sequence[Look],
    records: Sequence[RequestRecord],
    options: ScalingOptions,
    *,
    minimum: int,
    seen_after_s: float,
) -> None:
    """Judge one burst, from a calm fleet to a calm fleet.

    Parameters
    ----------
    report
        Gets the figures and the checks.
    looks
        The fleet over time; burst and calm after it.
    records
        All requests.
    options
        Of the policy.
    minimum
        Replicas of the calm fleet.
    seen_after_s
        A replica's state may be so much older for the policy than for these looks, seconds. Two
        steps may look closer to each other by that, and what a replica began since is not seen.
    """
    steps = steps_of([(look.time_s, look.target) for look in looks])
    broken = broken_promises(looks, seen_after_s)
    report.figures.update(_figures(looks, records, steps))
    report.figures["stopped_in_spite_of"] = broken
    quiet_s = max((record.scheduled_s for record in records), default=0.0)
    report.check(
        "the fleet grew during the burst",
        any(step.replicas > 0 and step.time_s < quiet_s for step in steps),
    )
    report.check(
        "every replica that was asked for came",
        max(look.running for look in looks) == max(look.target for look in looks) > minimum,
    )
    report.check(
        f"the fleet is back at {minimum}",
        looks[-1].target == looks[-1].running == minimum and not looks[-1].stopping,
    )
    report.check("one burst, one turn: no step up after a step down", turns(steps) == 1)
    report.check(
        "no step down within calm_s of another step",
        not hasty(steps, options.calm_s - seen_after_s),
    )
    report.check("every step was bounded", not unbounded(steps, options))
    report.check("no replica stopped that restored or owed full precision", not broken)
    report.check("all requests answered", all(record.outcome is Outcome.OK for record in records))


def broken_promises(looks: Sequence[Look], seen_after_s: float) -> list[str]:
    """Replicas that were stopped although they had to stay, and had had to for ``seen_after_s``."""
    free_at_s: dict[str, float] = {}
    broken = []
    for before, look in pairwise(looks):
        for name, state in before.states.items():
            # Before it was first seen nothing is known: so long ago it may have been free.
            free_at_s.setdefault(name, before.time_s)
            if not (state.restoring or state.full_requests):
                free_at_s[name] = before.time_s
        broken += [
            name
            for name in sorted(look.leaving - before.leaving)
            if look.time_s - free_at_s.get(name, look.time_s) > seen_after_s
        ]
    return broken


def _figures(
    looks: Sequence[Look], records: Sequence[RequestRecord], steps: Sequence[Step]
) -> dict[str, Any]:
    spans = [(look, after.time_s - look.time_s) for look, after in pairwise(looks)]
    replica_s = sum(look.running * span_s for look, span_s in spans)
    fast_s = sum(look.fast * span_s for look, span_s in spans)
    latencies = {
        "ttft": percentiles(record.ttft_s for record in records),
        "e2el": percentiles(record.e2e_s for record in records),
    }
    return {
        "simulated": False,
        "requests": len(records),
        "answered": sum(record.outcome is Outcome.OK for record in records),
        "reasons": sorted({record.reason for record in records if record.reason is not None}),
        "seconds": looks[-1].time_s,
        "steps": [asdict(step) for step in steps],
        "turns": turns(steps),
        "most_replicas": max(look.running for look in looks),
        "replica_seconds": replica_s,
        "fast_share": fast_s / replica_s if replica_s else 0.0,
        "longest_queue": max(look.queued for look in looks),
        "left": sorted({name for look in looks for name in look.leaving}),
        **{name: asdict(of) if of is not None else None for name, of in latencies.items()},
        "sizes": [
            (look.time_s, look.running, look.target)
            for before, look in pairwise([looks[0], *looks])
            if look is looks[0] or (look.running, look.target) != (before.running, before.target)
        ],
    }


def text(figures: dict[str, Any]) -> str:
    """The figures for people."""
    steps = ", ".join(f"{step['time_s']:.0f} s {step['replicas']:+d}" for step in figures["steps"])
    ttft = figures["ttft"]
    first = f"{ttft['p50_ms']:.0f} ms p50, {ttft['p95_ms']:.0f} ms p95" if ttft else "-"
    return (
        f"{figures['answered']} of {figures['requests']} requests answered; "
        f"time to first token {first}\n"
        f"steps: {steps}\n"
        f"most replicas {figures['most_replicas']}, turns {figures['turns']}, "
        f"{figures['fast_share']:.1%} of replica time in fast mode, "
        f"longest queue {figures['longest_queue']}"
    )
