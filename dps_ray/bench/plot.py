"""Picture of a replay: KV memory and mode of every replica, TTFT and arrivals over time."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dps_ray.bench.fleet_samples import FleetSample, mode_spans, replica_ids, track
from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.bench.slo import SloTarget
from dps_ray.modes import Mode

BLUE, AMBER, GREEN, RED, GREY, INK = (
    "#2563a8",
    "#f4b942",
    "#3a9d6e",
    "#c8402f",
    "#9aa3ad",
    "#27303a",
)
STYLE = {
    "font.size": 9,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}
DOTS_PER_INCH = 150


def draw(
    path: Path,
    samples: Sequence[FleetSample],
    records: Sequence[RequestRecord],
    target: SloTarget,
    title: str,
) -> None:
    """Write a PNG.

    Parameters
    ----------
    path
        Where to write it; the folder must exist.
    samples
        Readings of the fleet, in order of time.
    records
        Every request that was sent.
    target
        Its TTFT limit is drawn.
    title
        One line above the picture.
    """
    replicas = replica_ids(samples)
    heights = [2.0] * len(replicas) + [2.2, 1.1]
    with rc_context(STYLE):
        # A figure without pyplot needs no display and leaves the caller's backend alone.
        figure = Figure(figsize=(10, 1.1 * sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        for number, replica_id in enumerate(replicas):
            _draw_memory(axes[number], samples, replica_id, f"replica {number + 1}")
            _shade_modes(axes[number], samples, replica_id)
        draw_ttft(axes[-2], records, target)
        draw_arrivals(axes[-1], records)
        axes[-1].set_xlabel("time since the start of the replay, s")
        axes[-1].set_xlim(left=0)
        figure.suptitle(title, fontsize=11, fontweight="bold", color=INK, x=0.01, ha="left")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=6, fontsize=8)
        figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_memory(axis: Any, samples: Sequence[FleetSample], replica_id: str, name: str) -> None:
    known = [
        (time_s, state)
        for time_s, state in track(samples, replica_id)
        if state.used_blocks is not None and state.free_blocks is not None
    ]
    times = [time_s for time_s, _ in known]
    used = [state.used_blocks or 0 for _, state in known]
    at_hand = [(state.used_blocks or 0) + (state.free_blocks or 0) for _, state in known]
    axis.fill_between(times, used, step="post", color=BLUE, alpha=0.85, linewidth=0)
    axis.step(times, at_hand, where="post", color=INK, linewidth=1.2)
    base = known[-1][1].base_blocks if known else None
    if base is not None:
        axis.axhline(base, color=GREY, linestyle="--", linewidth=1.0)
    axis.set_ylim(0, 1.12 * max([*at_hand, 1]))
    axis.set_ylabel("KV blocks")
    axis.set_title(name, fontsize=9, loc="left", color=INK)


def _shade_modes(axis: Any, samples: Sequence[FleetSample], replica_id: str) -> None:
    for start_s, end_s, mode in mode_spans(samples, replica_id):
        if mode is Mode.FAST:
            axis.axvspan(start_s, end_s, color=AMBER, alpha=0.30, linewidth=0, zorder=0)
    states = track(samples, replica_id)
    for (start_s, state), (end_s, _) in pairwise(states):
        if state.restoring:
            axis.axvspan(start_s, end_s, ymin=0.95, color=GREEN, alpha=0.9, linewidth=0)


def draw_ttft(axis: Any, records: Sequence[RequestRecord], target: SloTarget) -> None:
    """Time to first token of every request by its arrival; lost ones are crosses."""
    limit_s = target.ttft_ms / 1000.0
    answered = [
        (record.scheduled_s, record.ttft_s) for record in records if record.ttft_s is not None
    ]
    for color, met in ((BLUE, True), (RED, False)):
        chosen = [(at_s, ttft_s) for at_s, ttft_s in answered if (ttft_s <= limit_s) is met]
        axis.scatter(
            [at_s for at_s, _ in chosen],
            [ttft_s for _, ttft_s in chosen],
            s=16,
            color=color,
            alpha=0.75,
            linewidth=0,
        )
    lost = [record.scheduled_s for record in records if record.outcome is not Outcome.OK]
    if lost:
        axis.scatter(lost, [limit_s] * len(lost), marker="x", color=RED, s=40)
    axis.axhline(limit_s, color=RED, linestyle="--", linewidth=1.0)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel("TTFT, s")
    axis.set_title("time to first token, by arrival", fontsize=9, loc="left", color=INK)


def draw_arrivals(axis: Any, records: Sequence[RequestRecord]) -> None:
    """Requests sent in each second."""
    arrivals = [record.scheduled_s for record in records]
    axis.hist(arrivals, bins=range(int(max(arrivals, default=0)) + 2), color=GREY)
    axis.set_ylabel("requests/s")
    axis.set_title("arrivals", fontsize=9, loc="left", color=INK)


def _legend() -> list[Any]:
    return [
        Patch(color=BLUE, alpha=0.85, label="KV blocks held"),
        Line2D([], [], color=INK, linewidth=1.2, label="KV blocks at hand"),
        Line2D([], [], color=GREY, linestyle="--", label="without lent weights"),
        Patch(color=AMBER, alpha=0.45, label="fast mode"),
        Patch(color=GREEN, label="restoring"),
        Line2D([], [], color=RED, linestyle="--", label="TTFT objective"),
    ]
