"""Runs the comparisons of every shape and turns times into ratios."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from dps_ray.bench.kernels.rounds import Pace, fastest, interleave, ratio, spread
from dps_ray.bench.kernels.shapes import TOKENS, Shape
from dps_ray.bench.kernels.subject import FAST, FP8, FULL, PEAK, RIVALS, STREAM, Device, Job
from dps_ray.bench.kernels.subjects import make_subject

Say = Callable[[str], None]

ERROR_MAX = {FAST: 0.1, FP8: 0.1}
"""Errors above these, relative to the largest output, mean a broken kernel."""
ERROR_MAX_16BIT = 0.01


@dataclass(frozen=True)
class KernelBench:
    """What to compare and for how long."""

    shapes: Sequence[Shape]
    tokens: Sequence[int] = TOKENS
    formats: Sequence[str | None] = (None,)
    """Nested formats; ``None``: what the engine would choose."""
    dtype: torch.dtype = torch.bfloat16
    working_set_bytes: int = 1_500_000_000
    pace: Pace = field(default_factory=Pace)


def run_bench(
    bench: KernelBench,
    device: Device,
    on_row: Callable[[dict[str, Any]], None],
    say: Say,
) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Measure everything.

    Parameters
    ----------
    bench
        What to compare.
    device
        Where to run.
    on_row
        Receives each row as it is measured.
    say
        Receives what cannot be compared.

    Returns
    -------
    rows, checks
        JSON-ready rows; which kernels computed the right numbers.
    """
    rows, checks = [], {}
    for shape in bench.shapes:
        lack = device.lacks(shape)
        if lack is not None:
            say(lack)
            continue
        for fmt in bench.formats:
            subject = make_subject(device, shape, fmt, bench.dtype, bench.working_set_bytes)
            for note in subject.notes:
                say(note)
            for name, error in subject.errors.items():
                label = f"{shape.name} {subject.fmt}: {name} is within its error"
                checks[label] = error <= ERROR_MAX.get(name, ERROR_MAX_16BIT)
            for tokens in bench.tokens:
                job = subject.job(tokens)
                times = interleave(
                    job.contenders, bench.pace, time.perf_counter, device.synchronize
                )
                row = {
                    "shape": shape.name,
                    "format": subject.fmt,
                    "dtype": str(bench.dtype).removeprefix("torch."),
                    "tokens": tokens,
                    **figures(times, job),
                }
                rows.append(row)
                on_row(row)
            del subject, job
            gc.collect()
    return rows, checks


def figures(times: dict[str, list[float]], job: Job) -> dict[str, Any]:
    """Ratios of one comparison: speed against the best stock kernel, share of stream bandwidth."""
    rival = fastest(times, [name for name in RIVALS if name in times])
    kernels = [name for name in times if name not in (STREAM, PEAK)]
    result: dict[str, Any] = {
        "rounds": len(times[rival]),
        "us": {name: median(times[name]) * 1e6 for name in kernels},
        "rival": rival,
        "speedup": {name: asdict(ratio(times[rival], times[name])) for name in (FULL, FAST)},
    }
    if FP8 in times:
        result["fast_over_fp8"] = asdict(ratio(times[FP8], times[FAST]))
    if STREAM in times:
        gbps = _rates(job.read_bytes, times, 1e9)
        result["stream_gbps"] = asdict(spread(gbps[STREAM]))
        result["bandwidth_share"] = {
            name: asdict(ratio(gbps[name], gbps[STREAM])) for name in kernels
        }
    if PEAK in times:
        tflops = _rates(job.flops, times, 1e12)
        result["peak_tflops"] = asdict(spread(tflops[PEAK]))
        result["peak_share"] = {name: asdict(ratio(tflops[name], tflops[PEAK])) for name in kernels}
    return result


def _rates(
    amounts: dict[str, int], times: dict[str, list[float]], unit: float
) -> dict[str, list[float]]:
    """Amount per second in every round, in ``unit``."""
    return {name: [amounts[name] / each / unit for each in times[name]] for name in times}
