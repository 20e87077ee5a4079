"""``dps-ray models``: make or convert the models used by the demo and the tests."""

import argparse
import time

from dps_ray.cli.arguments import result_folder
from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.cli.parser import add_commands
from dps_ray.models.cache import cache_root
from dps_ray.models.named import NAMED, model_folder
from dps_ray.models.tiny import DTYPES
from dps_ray.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = add_commands(parser, "action")
    prepare = actions.add_parser("prepare", help="make or convert one model and print its folder")
    prepare.add_argument("model", choices=NAMED, metavar="model", help=f"one of {', '.join(NAMED)}")
    prepare.add_argument("--dtype", choices=sorted(DTYPES), default="float16")
    prepare.add_argument(
        "--root",
        type=result_folder,
        default=None,
        help="folder that holds the models (default: $DPS_RAY_CACHE/models, else .cache/models)",
    )
    add_json_flag(prepare)
    prepare.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    folder = model_folder(args.model, args.dtype, args.root or cache_root())
    seconds = time.perf_counter() - started
    report = Report("models prepare", {"folder": str(folder), "seconds": round(seconds, 2)})
    report.check("folder holds weights", (folder / "model.safetensors").is_file())
    say(args, f"{args.model} ({args.dtype}) is in {folder} ({seconds:.1f} s)")
    return finish(args, report)
