"""``dps-ray validate``: everything wrong with Serve config files, before they are deployed."""

import argparse
from pathlib import Path

from dps_ray.cli.output import add_json_flag, finish, say
from dps_ray.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", help="config files for serve run or deploy")
    parser.add_argument(
        "--with-model",
        action="store_true",
        help="also look for the model's folder, from the working folder",
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check every file; exit status 0 only when all of them can be deployed."""
    # vLLM and Ray take seconds to import.
    from dps_deployments.validation import validate_file

    found = {path: validate_file(path, with_model=args.with_model) for path in args.files}
    for path, problems in found.items():
        for problem in problems:
            say(args, f"{path}:{problem.line}: {problem.text}")
    report = Report(
        "validate",
        {
            "problems": [
                {"file": str(path), "line": problem.line, "text": problem.text}
                for path, problems in found.items()
                for problem in problems
            ]
        },
    )
    for path, problems in found.items():
        report.check(str(path), not problems)
    return finish(args, report)
