"""Outcome of a check, a benchmark or a demo, before anyone decides how to print it."""

from collections.abc import Mapping, Sequence
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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line of text for each row, all cells of a column ending at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
