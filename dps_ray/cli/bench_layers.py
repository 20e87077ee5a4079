"""``dps-ray bench layers``: precision while it returns layer by layer."""

import argparse

from dps_ray.bench.engines import layers
from dps_ray.bench.engines.layers import LayersBench
from dps_ray.bench.engines.turns import all_cores
from dps_ray.checks.specs import EngineSpec
from dps_ray.cli.arguments import number, picture_file, result_folder, whole
from dps_ray.cli.model_argument import model_name
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.models.cache import cache_root
from dps_ray.models.named import SMOLLM2, model_folder
from dps_ray.report import Report


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``bench layers``."""
    bench = LayersBench()
    command.add_argument(
        "--model", type=model_name, default=SMOLLM2, help="smollm2, tiny:NAME or a model folder"
    )
    command.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    command.add_argument("--texts", type=whole(), default=bench.texts, help="texts to score")
    command.add_argument("--text-tokens", type=whole(), default=bench.text_tokens, help="of each")
    command.add_argument(
        "--choices", type=whole(), default=bench.choices, help="steps from no full layer to all"
    )
    command.add_argument("--residents", type=whole(), default=bench.residents)
    command.add_argument("--fillers", type=whole(), default=bench.fillers, help="of each burst")
    command.add_argument(
        "--restore-mb-per-s",
        type=number(above=0.0),
        default=bench.restore_bytes_per_s / 1e6,
        help="rate of the restores, 10^6 bytes/s: a small model must return slowly enough for "
        "several steps to pass (%(default)s)",
    )
    command.add_argument(
        "--kv-mb", type=number(above=0.0), default=24.0, help="KV memory, 10^6 bytes"
    )
    command.add_argument("--kernel", choices=("auto", "exact", "fused"), default="auto")
    command.add_argument("--seed", type=whole(0), default=bench.seed)
    command.add_argument("--rounds", type=whole(), default=bench.rounds)
    command.add_argument("--threads", type=whole(), default=all_cores(), help="OpenMP threads")
    command.add_argument("--root", type=result_folder, default=None, help="folder of the models")
    command.add_argument("--plot", type=picture_file, default=None, help="PNG to draw")
    add_json_flag(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; exit status 0 only when every check holds."""
    bench = LayersBench(
        texts=args.texts,
        text_tokens=args.text_tokens,
        choices=args.choices,
        residents=args.residents,
        fillers=args.fillers,
        restore_bytes_per_s=args.restore_mb_per_s * 1e6,
        rounds=args.rounds,
        seed=args.seed,
        threads=args.threads,
    )
    base = EngineSpec(
        label=f"{args.model} {args.dtype}",
        model=str(model_folder(args.model, args.dtype, args.root or cache_root())),
        kv_bytes=int(args.kv_mb * 1e6),
        max_model_len=1024,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    figures = layers.run_layers(base, 4 * base.kv_bytes, bench, args.kernel, lambda t: say(args, t))
    say(args, layers.time_table(figures))
    if args.plot is not None:
        from dps_ray.bench.engines.layers_plot import draw_layers

        rate = f"restores at {args.restore_mb_per_s:g} MB/s"
        draw_layers(args.plot, figures, f"{base.label}: layers that return one by one, {rate}")
    report = Report("bench layers", {"model": base.label, "threads": args.threads, **figures})
    rows = figures["by_layers"]
    report.check("with all layers full the divergence is 0", rows[-1]["kl"]["high"] == 0.0)
    report.check("with none it is largest", rows[0]["kl"]["median"] == max(
        row["kl"]["median"] for row in rows
    ))  # fmt: skip
    report.check(
        "layer by layer the way back diverges less than all at once",
        figures["exposure_ratio"]["high"] < 1.0,
    )
    return finish(args, report)
