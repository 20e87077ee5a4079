"""Picture of a simulated fleet: its size, its demand, and what fast mode bridged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from matplotlib import rc_context
from matplotlib.figure import Figure

from dps_ray.bench.plot import AMBER, BLUE, DOTS_PER_INCH, GREY, INK, RED, STYLE


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


def draw_autoscaling(path: Path, ticks: Sequence[FleetTick], base_blocks: int) -> None:
    """Write a PNG.

    Parameters
    ----------
    path
        Where to write it; the folder must exist.
    ticks
        The fleet over time.
    base_blocks
        KV blocks of one replica in full mode.
    """
    time_s = [tick.time_s for tick in ticks]
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 5), layout="constrained")
        size, queue = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
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
        size.legend(loc="upper right", fontsize=8)
        size.set_title("simulation of a recorded burst around the real policy", color=INK)
        queue.plot(time_s, [tick.queued for tick in ticks], color=RED)
        queue.set_ylabel("requests queued")
        queue.set_xlabel("seconds")
        figure.savefig(path, dpi=DOTS_PER_INCH)
