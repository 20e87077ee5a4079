"""``dps-ray bench layers``: what full precision is worth while it returns layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from dps_ray.bench.engines.turns import EngineProcess, engines, in_turns
from dps_ray.bench.kernels.rounds import ratio, spread
from dps_ray.bench.prompts import token_id_prompts
from dps_ray.checks.specs import EngineSpec

ALL, LAYER = "all at once", "layer by layer"
RETURN_BY = {ALL: "all", LAYER: "layer"}
SLICES = 10
"""Parts of the way back in the table."""


@dataclass(frozen=True)
class LayersBench:
    """Texts to score, and a burst to come back from."""

    texts: int = 4
    text_tokens: int = 96
    choices: int = 5
    """Steps from no full layer to all of them."""
    residents: int = 4
    fillers: int = 6
    restore_bytes_per_s: float = 100e6
    steps_after: int = 10
    """Steps in full mode that still count."""
    rounds: int = 3
    seed: int = 0
    threads: int = 1


def specs(base: EngineSpec, kernel: str, restore_bytes_per_s: float) -> dict[str, EngineSpec]:
    """One engine for each way to return; restores begin at once and run at one rate, whatever it
    does to the steps: both ways must be as long."""
    options = {
        "kernel": kernel,
        "min_fast_dwell_s": 0.0,
        "restore_chunk_bytes": 256 << 10,
        "restore_max_inflation": 0.0,
        "restore_floor_bytes_per_s": restore_bytes_per_s,
        "restore_cap_bytes_per_s": restore_bytes_per_s,
    }
    return {
        name: replace(base, label=f"{base.label} {name}", dps={**options, "return_by": return_by})
        for name, return_by in RETURN_BY.items()
    }


def run_layers(
    base: EngineSpec,
    free_kv_bytes: int,
    bench: LayersBench,
    kernel: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Score a static engine with more and more full layers, then let both ways take turns."""
    static = replace(
        base,
        label=f"{base.label} static",
        kv_bytes=free_kv_bytes,
        dps={"kernel": kernel, "pin": "fast", "lend": False, "return_by": "layer"},
    )
    prompt = token_id_prompts(bench.seed)
    with engines({"static": static}, bench.threads) as running:
        scored = running["static"].work(
            "by_layers",
            prompts=[prompt(index, 16) for index in range(bench.texts)],
            tokens=bench.text_tokens,
            seed=bench.seed,
            choices=bench.choices,
        )
    rows = [row_of(row, scored["layers"]) for row in scored["rows"]]
    say(layers_table(rows, scored["layers"]))
    ways = specs(base, kernel, bench.restore_bytes_per_s)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    with engines(ways, bench.threads) as running:
        for process in running.values():
            _turn(process, base, replace(bench, fillers=1), -1)
        for number, name in in_turns(list(ways), bench.rounds):
            turns[name].append(_turn(running[name], base, bench, number))
            say(f"round {number + 1}: {name:<16}{turns[name][-1]['return_s']:.2f} s to full mode")
    return {"layers": scored["layers"], "by_layers": rows, **figures(turns)}


def _turn(
    process: EngineProcess, base: EngineSpec, bench: LayersBench, number: int
) -> dict[str, Any]:
    prompt = token_id_prompts(seed=bench.seed + 1000 * (number + 2))
    per_filler = base.max_model_len * 3 // 4
    result = process.work(
        "way_back",
        residents=[prompt(index, 16) for index in range(bench.residents)],
        fillers=[prompt(bench.residents + index, per_filler) for index in range(bench.fillers)],
        filler_tokens=bench.fillers * 2,
        steps_after=bench.steps_after,
    )
    points = result["points"]
    result["return_s"] = next(point["time_s"] for point in points if point["full"])
    result["steps"] = sum(not point["full"] for point in points)
    return result


def row_of(row: dict[str, Any], layers: int) -> dict[str, Any]:
    """One row of the first table, JSON-ready."""
    return {
        "layers": row["layers"],
        "share": row["layers"] / layers,
        "kl": asdict(spread(row["kl"])),
        "same_token": mean(row["same_token"]),
    }


def figures(turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Divergence over the way back, and its sum over time as a ratio of the two ways."""
    horizon_s = [max(one["return_s"] for one in both) for both in zip(*turns.values(), strict=True)]
    exposure = {
        name: [exposure_of(one["points"], end) for one, end in zip(each, horizon_s, strict=True)]
        for name, each in turns.items()
    }
    return {
        "rounds": len(horizon_s),
        "return_s": {
            name: asdict(spread([one["return_s"] for one in each])) for name, each in turns.items()
        },
        "steps": {name: mean(one["steps"] for one in each) for name, each in turns.items()},
        "exposure": {name: asdict(spread(values)) for name, values in exposure.items()},
        "exposure_ratio": asdict(ratio(exposure[LAYER], exposure[ALL])),
        "return_ratio": asdict(
            ratio(*([one["return_s"] for one in turns[name]] for name in (LAYER, ALL)))
        ),
        "over_time": {
            name: over_time([one["points"] for one in each], mean(horizon_s))
            for name, each in turns.items()
        },
        "points": {name: [one["points"] for one in each] for name, each in turns.items()},
    }


def exposure_of(points: Sequence[dict[str, Any]], end_s: float) -> float:
    """Divergence summed over the time until ``end_s``, nat seconds: each step's over its length."""
    total, before_s = 0.0, 0.0
    for point in points:
        until_s = min(point["time_s"], end_s)
        total += mean(point["kl"]) * max(0.0, until_s - before_s)
        before_s = point["time_s"]
    return total


def over_time(rounds: Sequence[Sequence[dict[str, Any]]], end_s: float) -> list[dict[str, float]]:
    """Mean divergence and mean number of full layers in equal slices of time."""
    slices = []
    for number in range(SLICES + 1):
        start_s, stop_s = (end_s * part / SLICES for part in (number, number + 1))
        inside = [
            point for points in rounds for point in points if start_s <= point["time_s"] < stop_s
        ]
        if inside:
            slices.append(
                {
                    "from_s": start_s,
                    "kl": mean(value for point in inside for value in point["kl"]),
                    "layers_full": mean(point["layers_full"] for point in inside),
                }
            )
    return slices


def layers_table(rows: Sequence[dict[str, Any]], layers: int) -> str:
    """Divergence by layers back, as lines for people."""
    lines = [f"{'layers full':>14}{'share':>8}{'KL, nats (quartiles)':>32}{'same token':>12}"]
    for row in rows:
        kl = row["kl"]
        spread_text = f"{kl['median']:.5f} ({kl['low']:.5f}-{kl['high']:.5f})"
        lines.append(
            f"{row['layers']:>8} of {layers:>2}{row['share']:>8.0%}{spread_text:>32}"
            f"{row['same_token']:>12.1%}"
        )
    return "\n".join(lines)


def time_table(figures: dict[str, Any]) -> str:
    """The way back, as lines for people."""
    lines = [
        f"{'since the burst, s':>20}"
        + "".join(f"{name + ': KL (layers)':>30}" for name in RETURN_BY)
    ]
    for slices in zip(*(figures["over_time"][name] for name in RETURN_BY), strict=False):
        cells = "".join(f"{one['kl']:>20.5f} ({one['layers_full']:>4.1f})  " for one in slices)
        lines.append(f"{slices[0]['from_s']:>20.2f}{cells}")
    over = figures["exposure_ratio"]
    longer = figures["return_ratio"]
    lines.append(
        f"KL summed over the way back, {LAYER} / {ALL}: {over['median']:.2f} "
        f"({over['low']:.2f}-{over['high']:.2f}); time to full mode: {longer['median']:.2f} "
        f"({longer['low']:.2f}-{longer['high']:.2f}); {figures['rounds']} rounds"
    )
    return "\n".join(lines)
