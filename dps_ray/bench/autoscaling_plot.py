"""Picture of a fleet that scales: its size, its demand, and what fast mode bridged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from matplotlib import rc_context
from matplotlib.figure import Figure

from dps_ray.bench.plot import (
    AMBER,
    BLUE,
    DOTS_PER_INCH,
    GREY,
    INK,
    RED,
    STYLE,
    draw_arrivals,
    draw_ttft,
)
from dps_ray.bench.records import RequestRecord
from dps_ray.bench.slo import SloTarget


class FleetTick(Protocol):
    """The fleet at one moment."""

    @property
    def time_s(self) -> float: ...
    @property
    def running(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def fast(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def demand_blocks(self) -> int: ...


def draw_autoscaling(
    path: Path,
    ticks: Sequence[FleetTick],
    base_blocks: int,
    title: str,
    records: Sequence[RequestRecord] = (),
) -> None:
    """Write a PNG.

    Parameters
    ----------
    path
        Where to write it; the folder must exist.
    ticks
        The fleet over time.
    base_blocks
        KV blocks of one replica in full mode.
    title
        One line above the picture.
    records
        Real requests: their times to first token and arrivals are drawn below.
    """
    time_s = [tick.time_s for tick in ticks]
    with rc_context(STYLE):
        heights = [3.0, 1.0, *([1.5, 1.0] if records else [])]
        figure = Figure(figsize=(9, 1.25 * sum(heights)), layout="constrained")
        size, queue, *below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        size.fill_between(
            time_s, [tick.fast for tick in ticks], step="post", color=AMBER, label="in fast mode"
        )
        size.step(time_s, [tick.running for tick in ticks], where="post", color=BLUE)
        size.lines[-1].set_label("replicas running")
        size.step(time_s, [tick.target for tick in ticks], where="post", color=INK, linestyle=":")
        size.lines[-1].set_label("replicas wanted")
        size.plot(
            time_s,
            [tick.demand_blocks / base_blocks for tick in ticks],
            color=GREY,
            linewidth=0.8,
            label="KV in use, replicas' base memory",
        )
        size.set_ylabel("replicas")
        size.set_ylim(top=1.2 * max(tick.target for tick in ticks))
        size.legend(loc="upper center", fontsize=8, ncols=4)
        size.set_title(title, color=INK)
        queue.plot(time_s, [tick.queued for tick in ticks], color=RED)
        queue.set_ylabel("requests queued")
        if records:
            draw_ttft(below[0], records, SloTarget())
            draw_arrivals(below[1], records)
        (below[-1] if below else queue).set_xlabel("seconds")
        figure.savefig(path, dpi=DOTS_PER_INCH)
