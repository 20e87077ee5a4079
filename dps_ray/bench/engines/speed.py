"""``dps-ray bench engine``: decode speed of plain vLLM, full mode and fast mode, in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dps_ray.bench.engines.models import FAST, FULL, PLAIN, pinned
from dps_ray.bench.engines.turns import engines, in_turns
from dps_ray.bench.kernels.rounds import ratio, spread
from dps_ray.bench.prompts import token_id_prompts
from dps_ray.checks.specs import EngineSpec

FULL_TARGET = 0.98
"""Full mode must reach this share of plain vLLM's speed."""
MIN_ROUNDS = 3


@dataclass(frozen=True)
class SpeedBench:
    """What to generate, and how often."""

    batches: Sequence[int] = (1, 8, 32)
    prompt_tokens: int = 32
    output_tokens: int = 24
    rounds: int = 15
    """The most rounds of one batch size."""
    threads: int = 1
    row_s: float = 40.0
    """No further round begins after so many seconds, once there are ``MIN_ROUNDS``."""


def run_speed(
    base: EngineSpec, bench: SpeedBench, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure one model at every batch size; JSON-ready rows."""
    prompt = token_id_prompts(seed=0)
    rows = []
    with engines(pinned(base), bench.threads) as running:
        for batch in bench.batches:
            prompts = [prompt(index, bench.prompt_tokens) for index in range(batch)]
            work = {"prompts": prompts, "tokens": bench.output_tokens}
            for process in running.values():
                process.work("decode", **work)
            speeds: dict[str, list[float]] = {name: [] for name in running}
            began_s, last = time.monotonic(), 0
            for number, name in in_turns(list(running), bench.rounds):
                late = time.monotonic() - began_s > bench.row_s
                if late and number >= MIN_ROUNDS and number != last:
                    break
                last = number
                speeds[name].append(running[name].work("decode", **work)["tokens_per_s"])
            row = {"model": base.label, "batch": batch, **figures(speeds)}
            rows.append(row)
            say(line(row))
    return rows


def figures(speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Tokens per second and the ratios to plain vLLM."""
    return {
        "rounds": len(speeds[PLAIN]),
        "tokens_per_s": {name: asdict(spread(values)) for name, values in speeds.items()},
        "speedup": {name: asdict(ratio(speeds[name], speeds[PLAIN])) for name in (FULL, FAST)},
    }


HEADER = (
    f"{'model':<32}{'batch':>6}{'plain tokens/s':>16}{'full x (quartiles)':>21}"
    f"{'fast x (quartiles)':>21}{'rounds':>8}"
)


def line(row: dict[str, Any]) -> str:
    """One row of the table; ``x`` above 1 is faster than plain vLLM."""
    cells = [
        f"{figure['median']:.3f} ({figure['low']:.2f}-{figure['high']:.2f})"
        for figure in (row["speedup"][name] for name in (FULL, FAST))
    ]
    return (
        f"{row['model']:<32}{row['batch']:>6}{row['tokens_per_s'][PLAIN]['median']:>16.1f}"
        f"{cells[0]:>21}{cells[1]:>21}{row['rounds']:>8}"
    )
