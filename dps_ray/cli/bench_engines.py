"""``dps-ray bench engine`` and ``dps-ray bench pressure``: whole engines in turns."""

import argparse

from dps_ray.bench.engines import pressure, speed
from dps_ray.bench.engines.models import pressed
from dps_ray.bench.engines.pressure import PressureBench
from dps_ray.bench.engines.speed import SpeedBench
from dps_ray.bench.engines.turns import all_cores
from dps_ray.checks.specs import EngineSpec
from dps_ray.cli.arguments import number, result_folder, whole
from dps_ray.cli.model_argument import model_name
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.config import DpsConfigError
from dps_ray.models.cache import cache_root
from dps_ray.models.named import SMOLLM2, TINY_PREFIX, model_folder
from dps_ray.report import Report

DTYPES = ("bfloat16", "float16")
AMPLE_KV_BYTES = 256 << 20


def add_engine_arguments(command: argparse.ArgumentParser) -> None:
    bench = SpeedBench()
    command.add_argument(
        "--model",
        type=model_name,
        nargs="+",
        default=[SMOLLM2, f"{TINY_PREFIX}qwen3-moe"],
        help="smollm2, tiny:NAME or a model folder (%(default)s)",
    )
    command.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    command.add_argument("--batch", nargs="+", type=whole(), default=list(bench.batches))
    command.add_argument("--prompt-tokens", type=whole(), default=bench.prompt_tokens)
    command.add_argument("--output-tokens", type=whole(), default=bench.output_tokens)
    command.add_argument("--rounds", type=whole(), default=bench.rounds, help="at most")
    command.add_argument(
        "--row-s", type=number(above=0.0), default=bench.row_s, help="time for them, seconds"
    )
    command.add_argument(
        "--compiled",
        action="store_true",
        help="all engines under torch.compile, vLLM's default (a minute or more to start); "
        "else all run eagerly",
    )
    _add_common(command)
    command.set_defaults(run=run_engine)


def add_pressure_arguments(command: argparse.ArgumentParser) -> None:
    bench = PressureBench()
    command.add_argument(
        "--model", type=model_name, default=SMOLLM2, help="smollm2, tiny:NAME or a model folder"
    )
    command.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    command.add_argument("--requests", type=whole(), default=bench.requests, help="sent at once")
    for name, bounds in (("prompt", bench.prompt_tokens), ("output", bench.output_tokens)):
        command.add_argument(
            f"--{name}-tokens",
            nargs=2,
            type=whole(),
            metavar=("LEAST", "MOST"),
            default=list(bounds),
            help="bounds of the lengths (%(default)s)",
        )
    command.add_argument(
        "--kv-mb", type=number(above=0.0), default=59.0, help="KV memory, 10^6 bytes"
    )
    command.add_argument(
        "--free-kv-mb",
        type=number(above=0.0),
        default=165.0,
        help="KV memory of the engine that gets more for nothing: the most DPS can reach",
    )
    command.add_argument("--block-size", type=whole(), default=32, help="tokens of a KV block")
    command.add_argument("--max-num-seqs", type=whole(), default=64)
    command.add_argument("--max-num-batched-tokens", type=whole(), default=1024)
    command.add_argument(
        "--kernel", choices=("auto", "exact", "fused"), default="auto", help="of the DPS engine"
    )
    command.add_argument("--seed", type=whole(0), default=bench.seed)
    command.add_argument("--rounds", type=whole(), default=bench.rounds)
    _add_common(command)
    command.set_defaults(run=run_pressure)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--threads",
        type=whole(),
        default=all_cores(),
        help="OpenMP threads of an engine (%(default)s)",
    )
    command.add_argument(
        "--root", type=result_folder, default=None, help="folder of the models (default: the cache)"
    )
    add_json_flag(command)


def run_engine(args: argparse.Namespace) -> int:
    bench = SpeedBench(
        args.batch,
        args.prompt_tokens,
        args.output_tokens,
        args.rounds,
        args.threads,
        args.row_s,
    )
    how = "compiled" if args.compiled else "eager"
    report = Report("bench engine", {"threads": args.threads, "engines": how, "rows": []})
    say(args, speed.HEADER)
    for name in args.model:
        for dtype in args.dtype:
            base = EngineSpec(
                label=f"{name} {dtype} {how}",
                model=str(model_folder(name, dtype, args.root or cache_root())),
                kv_bytes=AMPLE_KV_BYTES,
                max_model_len=args.prompt_tokens + args.output_tokens,
                max_num_seqs=max(args.batch),
                enable_prefix_caching=False,
                compiled=args.compiled,
            )
            report.figures["rows"] += speed.run_speed(base, bench, lambda text: say(args, text))
    for row in report.figures["rows"]:
        report.check(
            f"{row['model']} batch {row['batch']}: full mode >= {speed.FULL_TARGET} x plain vLLM",
            row["speedup"]["full"]["median"] >= speed.FULL_TARGET,
        )
    return finish(args, report)


def run_pressure(args: argparse.Namespace) -> int:
    for flag, (least, most) in (
        ("--prompt-tokens", args.prompt_tokens),
        ("--output-tokens", args.output_tokens),
    ):
        if least > most:
            raise DpsConfigError(f"{flag} is {least} {most}: give the smaller bound first")
    bench = PressureBench(
        args.requests,
        tuple(args.prompt_tokens),
        tuple(args.output_tokens),
        args.rounds,
        args.seed,
        args.threads,
    )
    base = EngineSpec(
        label=f"{args.model} {args.dtype}",
        model=str(model_folder(args.model, args.dtype, args.root or cache_root())),
        kv_bytes=int(args.kv_mb * 1e6),
        max_model_len=args.prompt_tokens[1] + args.output_tokens[1],
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        enable_prefix_caching=False,
    )
    specs = pressed(base, int(args.free_kv_mb * 1e6), {"kernel": args.kernel})
    figures = pressure.run_pressure(specs, bench, lambda text: say(args, text))
    report = Report("bench pressure", {"model": base.label, "threads": args.threads, **figures})
    say(args, pressure.table(figures))
    report.check("DPS returned to full mode after every burst", figures["returned"])
    for rival, target in pressure.TARGETS.items():
        report.check(
            f"DPS serves at least {target} x the requests of {rival}",
            figures["dps_over"][rival]["median"] >= target,
        )
    return finish(args, report)
