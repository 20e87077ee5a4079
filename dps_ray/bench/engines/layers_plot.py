"""Picture of ``dps-ray bench layers``: divergence by layers back, and on the way back."""

from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from dps_ray.bench.engines.layers import ALL, LAYER
from dps_ray.bench.plot import AMBER, BLUE, DOTS_PER_INCH, GREY, INK, STYLE

COLORS = {ALL: AMBER, LAYER: BLUE}


def draw_layers(path: Path, figures: dict[str, Any], title: str) -> None:
    """Write a PNG of ``run_layers``'s figures; its folder must exist."""
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        by_layers, by_time = figure.subplots(1, 2)
        rows = figures["by_layers"]
        back = [row["layers"] for row in rows]
        by_layers.fill_between(
            back,
            [row["kl"]["low"] for row in rows],
            [row["kl"]["high"] for row in rows],
            color=BLUE,
            alpha=0.2,
            linewidth=0,
        )
        by_layers.plot(back, [row["kl"]["median"] for row in rows], color=BLUE, marker="o")
        by_layers.set_xlabel(f"layers in full precision, of {figures['layers']}")
        by_layers.set_ylabel("KL divergence from the 16-bit model, nats")
        by_layers.set_title("by layers: median and quartiles of the texts", fontsize=9, loc="left")
        for name, rounds in figures["points"].items():
            for points in rounds:
                by_time.plot(
                    [point["time_s"] for point in points],
                    [mean(point["kl"]) for point in points],
                    color=COLORS[name],
                    alpha=0.25,
                    linewidth=0.7,
                )
            slices = figures["over_time"][name]
            by_time.step(
                [one["from_s"] for one in slices],
                [one["kl"] for one in slices],
                where="post",
                color=COLORS[name],
                linewidth=2,
                label=name,
            )
            by_time.axvline(
                figures["return_s"][name]["median"], color=COLORS[name], linestyle="--", linewidth=1
            )
        by_time.axhline(0, color=GREY, linewidth=0.8)
        by_time.set_xlabel("time since the burst ended, s (dashed: full mode is back)")
        by_time.set_title("on the way back: rounds, and their mean", fontsize=9, loc="left")
        by_time.legend(fontsize=8)
        figure.suptitle(title, fontsize=11, fontweight="bold", color=INK, x=0.01, ha="left")
        figure.savefig(path, dpi=DOTS_PER_INCH)
