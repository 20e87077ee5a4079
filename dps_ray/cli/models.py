"""``dps-ray models``: make or convert the models used by the demo and the tests."""

import argparse
import time
from pathlib import Path

from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.config import DpsConfigError
from dps_ray.models.cache import cache_root
from dps_ray.models.smollm2 import prepare_smollm2
from dps_ray.models.tiny import DTYPES, TINY, make_tiny
from dps_ray.report import Report

TINY_PREFIX = "tiny:"


def model_names() -> list[str]:
    return ["smollm2", *(f"{TINY_PREFIX}{name}" for name in TINY)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    prepare = actions.add_parser("prepare", help="make or convert one model and print its folder")
    prepare.add_argument("model", help=f"one of {', '.join(model_names())}")
    prepare.add_argument("--dtype", choices=sorted(DTYPES), default="float16")
    prepare.add_argument(
        "--root",
        type=Path,
        default=None,
        help="folder that holds the models (default: $DPS_RAY_CACHE/models, else .cache/models)",
    )
    add_json_flag(prepare)
    prepare.set_defaults(run=run)


def prepare_model(model: str, root: Path, dtype: str) -> Path:
    """Prepare a model by its name on the command line.

    Raises
    ------
    DpsConfigError
        No such model.
    """
    if model == "smollm2":
        return prepare_smollm2(root, dtype=dtype)
    if model.startswith(TINY_PREFIX):
        return make_tiny(model.removeprefix(TINY_PREFIX), root, dtype=dtype)
    raise DpsConfigError(f"model is {model!r}: choose one of {', '.join(model_names())}")


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    folder = prepare_model(args.model, args.root or cache_root(), args.dtype)
    seconds = time.perf_counter() - started
    report = Report("models prepare", {"folder": str(folder), "seconds": round(seconds, 2)})
    report.check("folder holds weights", (folder / "model.safetensors").is_file())
    say(args, f"{args.model} ({args.dtype}) is in {folder} ({seconds:.1f} s)")
    return finish(args, report)
