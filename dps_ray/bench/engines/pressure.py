"""``dps-ray bench pressure``: a burst on equal memory, and what free memory would be worth."""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from dps_ray.bench.engines.models import DPS, FREE, PLAIN
from dps_ray.bench.engines.turns import EngineProcess, engines, in_turns
from dps_ray.bench.kernels.rounds import ratio, spread
from dps_ray.bench.prompts import token_id_prompts
from dps_ray.checks.specs import EngineSpec

WARM_UP_REQUESTS = 8
TARGETS = {FREE: 0.97, PLAIN: 1.45}
"""Requests per second of DPS, as multiples of the other two engines'."""


@dataclass(frozen=True)
class PressureBench:
    """One burst: ``requests`` at once, lengths drawn evenly between two bounds."""

    requests: int = 40
    prompt_tokens: tuple[int, int] = (150, 500)
    output_tokens: tuple[int, int] = (40, 120)
    rounds: int = 5
    seed: int = 0
    threads: int = 1

    def burst(self, number: int) -> dict[str, Any]:
        """Requests of one round, the same for every engine."""
        rng = random.Random(f"{self.seed}:{number}")
        prompt = token_id_prompts(seed=rng.randrange(1 << 30))
        lengths = [rng.randint(*self.prompt_tokens) for _ in range(self.requests)]
        outputs = [rng.randint(*self.output_tokens) for _ in range(self.requests)]
        prompts = [prompt(index, tokens) for index, tokens in enumerate(lengths)]
        return {"prompts": prompts, "outputs": outputs}


def run_pressure(
    specs: dict[str, EngineSpec], bench: PressureBench, say: Callable[[str], None]
) -> dict[str, Any]:
    """Let the engines of ``specs`` take turns at the same bursts; JSON-ready figures."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in specs}
    with engines(specs, bench.threads) as running:
        warm_up = replace(bench, requests=min(bench.requests, WARM_UP_REQUESTS)).burst(-1)
        for process in running.values():
            _turn(process, warm_up)
        for number, name in in_turns(list(specs), bench.rounds):
            result = _turn(running[name], bench.burst(number))
            results[name].append(result)
            say(f"round {number + 1}: {name:<12}{result['requests_per_s']:.3f} requests/s")
    return figures(results)


def _turn(process: EngineProcess, burst: dict[str, Any]) -> dict[str, Any]:
    """One burst from a settled state; the return to full mode is not part of its time."""
    result = process.work("burst", **burst)
    return {**result, **process.work("settle")}


def figures(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Rates, the ratios of DPS to the others, and what the engines did meanwhile."""
    rates = {name: [one["requests_per_s"] for one in each] for name, each in results.items()}
    return {
        "rounds": len(rates[DPS]),
        "requests_per_s": {name: asdict(spread(values)) for name, values in rates.items()},
        "dps_over": {name: asdict(ratio(rates[DPS], rates[name])) for name in TARGETS},
        "preemptions": _means(results, "preemptions"),
        "steps": _means(results, "steps"),
        "kv_peak_mb": {
            name: max(one["kv_peak_bytes"] for one in each) / 1e6 for name, each in results.items()
        },
        "fast_share": mean(one["fast_share"] for one in results[DPS]),
        "settle_s": mean(one["settle_s"] for one in results[DPS]),
        "returned": all(one["returned"] for one in results[DPS]),
    }


def _means(results: dict[str, list[dict[str, Any]]], key: str) -> dict[str, float]:
    return {name: mean(one[key] for one in each) for name, each in results.items()}


def table(figures: dict[str, Any]) -> str:
    """The figures as lines for people."""
    lines = [
        f"{'engine':<14}{'requests/s (quartiles)':>26}{'DPS x (quartiles)':>24}"
        f"{'preemptions':>13}{'steps':>8}{'KV peak MB':>12}"
    ]
    for name, rate in figures["requests_per_s"].items():
        over = figures["dps_over"].get(name)
        lines.append(
            f"{name:<14}{_spread(rate):>26}{'' if over is None else _spread(over):>24}"
            f"{figures['preemptions'][name]:>13.1f}{figures['steps'][name]:>8.0f}"
            f"{figures['kv_peak_mb'][name]:>12.1f}"
        )
    lines.append(
        f"{figures['rounds']} rounds; DPS: {figures['fast_share']:.0%} of the steps in fast mode, "
        f"back in full mode {figures['settle_s']:.2f} s after a burst"
    )
    return "\n".join(lines)


def _spread(figure: dict[str, float]) -> str:
    return f"{figure['median']:.3f} ({figure['low']:.3f}-{figure['high']:.3f})"
