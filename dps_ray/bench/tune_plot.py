"""Picture of a tuned policy: the worth of fast mode against occupancy, and what is decided."""

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from dps_ray.bench.plot import AMBER, BLUE, DOTS_PER_INCH, GREEN, GREY, INK, STYLE
from dps_ray.scheduling.mdp import FAST, FULL
from dps_ray.scheduling.tuning import Tuning


def draw_policy(path: Path, tuning: Tuning) -> None:
    """Write a PNG.

    Parameters
    ----------
    path
        Where to write it; the folder must exist.
    tuning
        What to draw.
    """
    solution = tuning.solution
    levels = solution.mdp.levels
    share = [tuning.costs.share_of_base(level, levels) for level in range(levels)]
    to_full, to_fast = solution.mdp.switch_cost
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 5), layout="constrained")
        worth, decided = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        worth.plot(share, solution.worth_of_fast, color=INK, label="worth of fast mode")
        worth.axhline(to_fast, color=AMBER, linestyle="--", label="cost of a switch to fast")
        worth.axhline(-to_full, color=BLUE, linestyle="--", label="minus the cost of a return")
        worth.axvline(1.0, color=GREY, linewidth=0.8)
        worth.text(1.0, worth.get_ylim()[0], " base memory full", va="bottom", color=GREY)
        worth.set_ylabel("step time, ms")
        worth.legend(loc="upper left", fontsize=8)
        rows = np.stack([solution.policy[:, FULL], solution.policy[:, FAST]])
        for row, fast in enumerate(rows):
            decided.fill_between(share, row - 0.4, row + 0.4, where=fast, color=AMBER, step="mid")
            decided.fill_between(share, row - 0.4, row + 0.4, where=~fast, color=GREEN, step="mid")
        decided.set_yticks([0, 1], ["in full mode", "in fast mode"])
        decided.set_xlabel("KV blocks in demand, as a share of base blocks")
        decided.set_title("green: the next period is full, amber: fast", fontsize=8, color=INK)
        figure.savefig(path, dpi=DOTS_PER_INCH)
