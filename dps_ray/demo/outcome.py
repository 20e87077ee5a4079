"""What a run of the demo showed: summary, checks and the table for people."""

import json
from pathlib import Path
from typing import Any

from dps_ray.bench.fleet_samples import precision_summary
from dps_ray.bench.plot import draw
from dps_ray.bench.report import summarise, table
from dps_ray.bench.slo import SloTarget
from dps_ray.demo.session import Session

SUMMARY, PICTURE = "summary.json", "demo.png"


def summarise_session(session: Session, target: SloTarget) -> dict[str, Any]:
    """Figures of the replay and of the fleet's elastic memory; JSON-ready."""
    return {
        **summarise(session.records, target),
        "elastic": precision_summary(session.samples),
        "samples": len(session.samples),
        "missed_samples": session.missed_samples,
    }


def write_outcome(
    folder: Path, summary: dict[str, Any], session: Session, target: SloTarget, title: str
) -> tuple[Path, Path]:
    """Write ``summary.json`` and ``demo.png``; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures, picture = folder / SUMMARY, folder / PICTURE
    figures.write_text(json.dumps(summary, indent=2))
    draw(picture, session.samples, session.records, target, title)
    return figures, picture


def describe(summary: dict[str, Any]) -> str:
    """Lay the summary out for a terminal."""
    elastic = summary["elastic"]
    lines = [
        table(summary),
        f"precision  {_share(elastic['share_full_precision'])} of output tokens in full precision "
        f"({elastic['tokens_full']} full, {elastic['tokens_fast']} fast)",
        f"switches   {elastic['switches_to_fast']} to fast, {elastic['switches_to_full']} to full; "
        f"{elastic['preemptions']} preemptions",
        f"restore    {elastic['restored_bytes'] / 1e6:.0f} MB copied in "
        f"{elastic['restore_busy_s']:.2f} s ({_number(elastic['restore_gb_per_s'])} GB/s); "
        f"longest last return {_number(elastic['last_restore_s'])} s",
    ]
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
