"""Runs the comparisons of every shape and turns times into ratios."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from dps_ray.bench.kernels.rounds import Pace, fastest, interleave, ratio, spread
from dps_ray.bench.kernels.shapes import TOKENS, Shape
from dps_ray.bench.kernels.subject import FAST, FP8, FULL, PEAK, RIVALS, STREAM, Device, Job
from dps_ray.bench.kernels.subjects import make_subject

Say = Callable[[str], None]
Times = dict[str, list[float]]
"""Seconds of each contender in every round."""

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
    threads: Sequence[int] = field(default_factory=lambda: (torch.get_num_threads(),))
    """Numbers of torch's threads; the first is compared with the others."""


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
                by_threads = _times(job, bench, device)
                for threads, times in by_threads.items():
                    row = {
                        "shape": shape.name,
                        "format": subject.fmt,
                        "dtype": str(bench.dtype).removeprefix("torch."),
                        "tokens": tokens,
                        "threads": threads,
                        **figures(times, job),
                    }
                    base = bench.threads[0]
                    if threads != base:
                        row["scaling"] = {"from": base, "x": scaling(by_threads[base], times)}
                    rows.append(row)
                    on_row(row)
            del subject, job
            gc.collect()
    return rows, checks


def figures(times: Times, job: Job) -> dict[str, Any]:
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
    gbps = _rates(job.read_bytes, times, 1e9)
    result["gbps"] = {name: median(gbps[name]) for name in kernels}
    gflops = _rates(job.flops, times, 1e9)
    result["gflops"] = {name: median(gflops[name]) for name in kernels}
    if STREAM in times:
        result["stream_gbps"] = asdict(spread(gbps[STREAM]))
        result["bandwidth_share"] = {
            name: asdict(ratio(gbps[name], gbps[STREAM])) for name in kernels
        }
    if PEAK in times:
        peak_tflops = [each / 1e3 for each in gflops[PEAK]]
        result["peak_tflops"] = asdict(spread(peak_tflops))
        result["peak_share"] = {name: asdict(ratio(gflops[name], gflops[PEAK])) for name in kernels}
    return result


def scaling(base: Times, other: Times) -> dict[str, Any]:
    """How much faster every contender and the stream probe are on another number of threads."""
    return {name: asdict(ratio(base[name], other[name])) for name in base}


def _times(job: Job, bench: KernelBench, device: Device) -> dict[int, Times]:
    """Seconds of each contender by number of threads: all of them share the rounds."""
    turns = {
        (threads, name): replace(contender, prepare=partial(_use_threads, threads))
        for threads in bench.threads
        for name, contender in job.contenders.items()
    }
    pace = replace(bench.pace, row_s=bench.pace.row_s * len(bench.threads))
    before = torch.get_num_threads()
    try:
        times = interleave(turns, pace, time.perf_counter, device.synchronize)
    finally:
        torch.set_num_threads(before)
    return {
        threads: {name: times[threads, name] for name in job.contenders}
        for threads in bench.threads
    }


def _use_threads(count: int) -> None:
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
        # The first parallel loop starts the threads.
        torch.ones(1 << 20).add_(1.0)


def _rates(amounts: Mapping[str, float], times: Times, unit: float) -> Times:
    """Amount per second in every round, in ``unit``, of the contenders that have one."""
    return {
        name: [amounts[name] / each / unit for each in values]
        for name, values in times.items()
        if name in amounts
    }
