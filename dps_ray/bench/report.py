"""Summary of a replay: one dictionary for machines, one table for people."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.bench.slo import Percentiles, SloTarget, evaluate, percentiles

LATENCIES = ("ttft", "tpot", "itl", "max_tbt", "e2el")


def summarise(records: Sequence[RequestRecord], target: SloTarget) -> dict[str, Any]:
    """Figures of a replay.

    Latencies are taken over successful requests; rates and attainment over all that were sent.

    Parameters
    ----------
    records
        Every request that was sent.
    target
        The service-level objective.

    Returns
    -------
    dict
        JSON-ready; latencies in milliseconds, ``None`` where nothing was measured.
    """
    done = [record for record in records if record.outcome is Outcome.OK]
    outcomes = Counter(record.outcome for record in records)
    duration_s = max((record.end_s or 0.0 for record in records), default=0.0)
    output_tokens = sum(record.output_tokens or 0 for record in done)
    gaps = {record.index: record.itl_s for record in done}
    latencies = {
        "ttft": percentiles(record.ttft_s for record in done),
        "tpot": percentiles(record.tpot_s for record in done),
        "itl": percentiles(gap for each in gaps.values() for gap in each),
        "max_tbt": percentiles(max(each) for each in gaps.values() if each),
        "e2el": percentiles(record.e2e_s for record in done),
    }
    return {
        "requests": {
            "sent": len(records),
            "ok": outcomes[Outcome.OK],
            "failed": outcomes[Outcome.FAILED],
            "rejected": outcomes[Outcome.REJECTED],
        },
        "reasons": dict(Counter(record.reason for record in records if record.reason)),
        "duration_s": duration_s,
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in done),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / duration_s if duration_s > 0 else 0.0,
        "send_lag_max_ms": 1000.0
        * max((record.sent_s - record.scheduled_s for record in records), default=0.0),
        "latency": {
            name: None if value is None else asdict(value) for name, value in latencies.items()
        },
        "slo": {**asdict(target), "max_tbt_ms": target.max_tbt_ms}
        | asdict(evaluate(records, target, duration_s)),
    }


def table(summary: dict[str, Any]) -> str:
    """Lay a summary out for a terminal."""
    requests, slo = summary["requests"], summary["slo"]
    lines = [
        f"requests   {requests['sent']} sent, {requests['ok']} ok, {requests['failed']} failed, "
        f"{requests['rejected']} rejected in {summary['duration_s']:.1f} s",
        f"tokens     {summary['prompt_tokens']} prompt, {summary['output_tokens']} output "
        f"({summary['output_tokens_per_s']:.1f} output tokens/s)",
        f"{'latency, ms':<11}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}",
    ]
    for name in LATENCIES:
        values = summary["latency"][name]
        lines.append(f"  {name:<9}" + _cells(None if values is None else Percentiles(**values)))
    lines.append(
        f"SLO        {slo['attainment']:.1%} of requests within TTFT {slo['ttft_ms']:g} ms "
        f"({slo['ttft_attainment']:.1%}) and TBT {slo['max_tbt_ms']:g} ms "
        f"({slo['tbt_attainment']:.1%}); goodput {slo['goodput_rps']:.2f} requests/s"
    )
    lines += [f"  {count} x {reason}" for reason, count in summary["reasons"].items()]
    return "\n".join(lines)


def _cells(values: Percentiles | None) -> str:
    if values is None:
        return f"{'-':>10}" * 4
    shown = (values.p50_ms, values.p95_ms, values.p99_ms, values.max_ms)
    return "".join(f"{value:>10.1f}" for value in shown)
