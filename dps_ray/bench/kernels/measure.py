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
from dps_ray.bench.kernels.subject import FAST, FULL, STREAM, Job, Subject

Say = Callable[[str], None]
MakeSubject = Callable[[Shape, str | None, torch.dtype, int], Subject]

ERROR_MAX = {FULL: 0.01, FAST: 0.1}
"""Errors above these, relative to the largest output, mean a broken kernel; stock has FULL's."""


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
    make: MakeSubject,
    synchronize: Callable[[], object],
    on_row: Callable[[dict[str, Any]], None],
    say: Say,
) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Measure everything.

    Parameters
    ----------
    bench
        What to compare.
    make
        Builds the contenders of a shape on the device.
    synchronize
        Waits for the device.
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
        for fmt in bench.formats:
            subject = make(shape, fmt, bench.dtype, bench.working_set_bytes)
            for note in subject.notes:
                say(note)
            for name, error in subject.errors.items():
                label = f"{shape.name} {subject.fmt}: {name} is within its error"
                checks[label] = error <= ERROR_MAX.get(name, ERROR_MAX[FULL])
            for tokens in bench.tokens:
                job = subject.job(tokens)
                times = interleave(job.contenders, bench.pace, time.perf_counter, synchronize)
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
    stock = [name for name in times if name not in (FULL, FAST, STREAM)]
    rival = fastest(times, stock)
    result: dict[str, Any] = {
        "rounds": len(times[rival]),
        "us": {name: median(values) * 1e6 for name, values in times.items() if name != STREAM},
        "rival": rival,
        "speedup": {name: asdict(ratio(times[rival], times[name])) for name in (FULL, FAST)},
    }
    if STREAM not in times:
        return result
    read = job.read_bytes
    gbps = {name: [read[name] / each / 1e9 for each in times[name]] for name in read}
    result["stream_gbps"] = asdict(spread(gbps[STREAM]))
    result["bandwidth_share"] = {
        name: asdict(ratio(gbps[name], gbps[STREAM])) for name in read if name != STREAM
    }
    return result
