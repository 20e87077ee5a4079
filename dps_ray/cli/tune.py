"""``dps-ray tune``: switching thresholds from measured costs, and what others would lose."""

import argparse
from dataclasses import asdict
from typing import Any

from dps_ray.bench.tune_input import TuneInput, read_input
from dps_ray.bench.tune_plot import draw_policy
from dps_ray.cli.arguments import picture_file, present_file, whole
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.report import Report
from dps_ray.scheduling.tuning import Comparison, Tuning, Watermarks, tune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "costs",
        type=present_file,
        help="YAML or JSON file of costs (fields: dps_ray/bench/README.md; an example: "
        "dps_ray/bench/data/costs.yaml)",
    )
    parser.add_argument(
        "--summary",
        type=present_file,
        help="summary.json of a demo: its occupancy and restores are used",
    )
    parser.add_argument(
        "--speed",
        type=present_file,
        help="what bench engine --json printed: its step times are used",
    )
    parser.add_argument(
        "--layers",
        type=present_file,
        help="what bench layers --json printed: its divergence is used",
    )
    parser.add_argument(
        "--levels", type=whole(3), default=101, help="occupancy levels (default: 101)"
    )
    parser.add_argument(
        "--compare",
        type=_compared,
        action="append",
        default=[],
        metavar="HIGH,LOW",
        help="watermarks to compare with the optimum; may be repeated (the defaults always are)",
    )
    parser.add_argument("--out", type=picture_file, help="PNG file for a picture of the policy")
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Solve, report, draw; exit status 0 only when the optimal policy is monotone."""
    given = read_input(args.costs, args.summary, args.speed, args.layers)
    tuning = _solve(given, args.levels)
    defaults = DpsOptions()
    default = Watermarks(defaults.high_watermark, defaults.low_watermark)
    comparisons = {
        name: tuning.compare(watermarks)
        for name, watermarks in [("tuned", tuning.watermarks), ("default", default), *args.compare]
    }
    report = Report("tune", _figures(tuning, comparisons))
    report.check("the optimal policy is monotone in occupancy", tuning.solution.monotone)
    report.check(
        "no compared watermarks lose more than their bound",
        all(found.loss <= found.bound * (1 + 1e-6) for found in comparisons.values()),
    )
    if args.out is not None:
        draw_policy(args.out, tuning)
    say(args, _text(tuning, comparisons))
    return finish(args, report)


def _solve(given: TuneInput, levels: int) -> Tuning:
    try:
        return tune(given.costs, given.kernel(levels), given.discount)
    except ValueError as error:
        raise DpsConfigError(str(error)) from None


def _figures(tuning: Tuning, comparisons: dict[str, Comparison]) -> dict[str, Any]:
    solution = tuning.solution
    return {
        "watermarks": asdict(tuning.watermarks),
        "thresholds": asdict(solution.thresholds),
        "levels": solution.mdp.levels,
        "discount": solution.mdp.discount,
        "violated_assumptions": solution.mdp.violated_assumptions(),
        "comparisons": {name: asdict(found) for name, found in comparisons.items()},
    }


def _text(tuning: Tuning, comparisons: dict[str, Comparison]) -> str:
    found = tuning.watermarks
    lines = [f"note: {sentence}" for sentence in tuning.solution.mdp.violated_assumptions()]
    if found.high <= 0.0:
        lines.append("full mode is never worth its cost: pin 'fast'")
    else:
        lines.append(
            f'--additional-config \'{{"dps": {{"high_watermark": {found.high:.3f}, '
            f'"low_watermark": {found.low:.3f}}}}}\''
        )
    if tuning.optimum_is_out_of_reach:
        lines.append(
            "the optimum waits longer than base memory lasts: the switch is the lend itself"
        )
    lines.append(
        f"{'':12} {'high':>6} {'low':>6} {'E, ms':>10} {'E/(1-g), ms':>12} {'loss, ms':>10}"
    )
    for name, entry in comparisons.items():
        lines.append(
            f"{name:12} {entry.watermarks.high:6.3f} {entry.watermarks.low:6.3f} "
            f"{entry.miscalibration:10.4g} {entry.bound:12.4g} {entry.loss:10.4g}"
        )
    return "\n".join(lines)


def _compared(text: str) -> tuple[str, Watermarks]:
    try:
        high, low = (float(part) for part in text.split(","))
    except ValueError:
        high, low = 0.0, 0.0
    if not 0.0 <= low < high <= 1.0:
        raise argparse.ArgumentTypeError(
            f"is {text!r}: give HIGH,LOW, two shares of which the first is larger, such as 0.9,0.6"
        )
    return text, Watermarks(high, low)
