"""One way for every command to report: lines for people, or one JSON object with ``ok``."""

import argparse
import json
import sys

from dps_ray.report import Report


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag, and tell the command its full name, which begins its refusals."""
    parser.set_defaults(prog=parser.prog)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def say(args: argparse.Namespace, text: str) -> None:
    """Progress for people; silent under ``--json``."""
    if not args.json:
        print(text, flush=True)


def finish(args: argparse.Namespace, report: Report) -> int:
    """Print the outcome and return the exit status: 0 only when every check held."""
    if args.json:
        json.dump(report.as_dict(), sys.stdout, indent=2, default=str)
        print()
    else:
        for name, passed in report.checks.items():
            print(f"{'ok  ' if passed else 'FAIL'} {name}")
        print("ok" if report.ok else "FAILED")
    return 0 if report.ok else 1
