"""One way for every command to report: lines for people, or one JSON object with ``ok``."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """Outcome of a command: what it asserts, and the figures it measured.

    ``ok`` is true only while every check passed.
    """

    command: str
    figures: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(self.checks.values())

    def check(self, name: str, passed: bool) -> bool:
        """Record one assertion; return whether it held."""
        self.checks[name] = bool(passed)
        return bool(passed)

    def as_dict(self) -> Mapping[str, Any]:
        return {"command": self.command, "ok": self.ok, "checks": self.checks, **self.figures}


def add_json_flag(parser: argparse.ArgumentParser) -> None:
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
