"""``dps-ray bench kernels``: nested GEMMs beside the stock kernels, interleaved in one process."""

import argparse
from typing import TYPE_CHECKING

from dps_ray.bench.kernels.shapes import SHAPES, TOKENS, find_shapes
from dps_ray.cli.arguments import number, whole
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.config import DpsConfigError
from dps_ray.engine.vllm_version import require_supported_vllm
from dps_ray.report import Report

if TYPE_CHECKING:
    from dps_ray.bench.kernels.measure import KernelBench
    from dps_ray.bench.kernels.subject import Device

DTYPES = ("bfloat16", "float16")
FORMATS = ("chosen", "e4m3", "e4m3_row", "e5m2")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument(
        "--shapes",
        nargs="+",
        default=sorted({shape.name.split(".")[0] for shape in SHAPES}),
        help=f"ROWSxCOLUMNS, a model, or of {', '.join(shape.name for shape in SHAPES)}",
    )
    command.add_argument(
        "--tokens", nargs="+", type=whole(), default=list(TOKENS), help="values of M (%(default)s)"
    )
    command.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=["chosen"],
        help="nested formats; 'chosen': the one the engine would take (default)",
    )
    command.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    command.add_argument(
        "--threads",
        nargs="+",
        type=whole(),
        help="CPU threads, the first compared with the others in the same rounds (torch's)",
    )
    command.add_argument(
        "--working-set-gb",
        type=number(above=0.0),
        default=1.5,
        help="weights that calls go round, all contenders together, 10^9 bytes: keep it above the "
        "last-level cache (%(default)s)",
    )
    command.add_argument(
        "--row-s",
        type=number(above=0.0),
        default=1.5,
        help="time of one row, seconds (%(default)s)",
    )
    command.add_argument("--max-rounds", type=whole(), default=25, help="of one row (%(default)s)")
    add_json_flag(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from dps_kernels.library import has_packed

    from dps_ray.bench.kernels import table
    from dps_ray.bench.kernels.measure import run_bench
    from dps_ray.bench.kernels.targets import verdicts

    bench = _bench(args)
    device = _device(args.device)
    report = Report("bench kernels", {"device": device.type, **device.figures()})
    if args.threads:
        report.figures["threads"] = args.threads
    say(args, ", ".join(f"{key} {value}" for key, value in report.figures.items()))
    say(args, table.HEADER)
    rows, checks = run_bench(
        bench,
        device,
        lambda row: say(args, table.line(row)),
        lambda text: say(args, text),
    )
    report.figures["rows"] = rows
    if device.type == "cpu" and args.dtype == "bfloat16" and has_packed():
        checks |= verdicts(rows)
    for label, held in checks.items():
        report.check(label, held)
    return finish(args, report)


def _bench(args: argparse.Namespace) -> "KernelBench":
    import torch

    from dps_ray.bench.kernels.measure import KernelBench
    from dps_ray.bench.kernels.rounds import Pace

    if args.threads and args.device != "cpu":
        raise DpsConfigError("--threads is for --device cpu: leave it out")
    threads = args.threads or [torch.get_num_threads()]
    if len(set(threads)) < len(threads):
        raise DpsConfigError(f"--threads is {threads}: give different numbers")
    return KernelBench(
        shapes=find_shapes(args.shapes),
        tokens=args.tokens,
        formats=[None if name == "chosen" else name for name in args.formats],
        dtype=getattr(torch, args.dtype),
        working_set_bytes=int(args.working_set_gb * 1e9),
        threads=threads,
        pace=Pace(max_rounds=max(args.max_rounds, Pace.min_rounds), row_s=args.row_s),
    )


def _device(name: str) -> "Device":
    if name == "cuda":
        from dps_ray.bench.kernels.device_cuda import CudaDevice

        return CudaDevice()
    require_supported_vllm()
    from dps_ray.bench.kernels.device_cpu import CpuDevice

    return CpuDevice()
