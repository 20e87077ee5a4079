"""Parts of ``check engine``: the engines a part needs, and how it judges what they did.

Most of a start is the interpreter and vLLM's import, so parts share processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dps_ray.checks.process import run_engines
from dps_ray.checks.specs import EngineSpec
from dps_ray.report import Report

Say = Callable[[str], None]
Results = list[dict[str, Any]]
"""What the scenarios of a part's engines returned, in the order of its engines."""


@dataclass(frozen=True)
class Part:
    """Some engines, run in this order, and the judge of their results."""

    specs: Sequence[EngineSpec]
    judge: Callable[[Report, Say, Results], None]


def run_parts(parts: Sequence[Part], timeout_s: float = 600.0) -> list[Results]:
    """Run the engines of all parts in one process; the results of each part.

    Plain engines come first: no elastic one has touched their process then.
    """
    engines = [
        (number, place, spec)
        for number, part in enumerate(parts)
        for place, spec in enumerate(part.specs)
    ]
    engines.sort(key=lambda engine: engine[2].dps is not None)
    answers = run_engines([spec for *_, spec in engines], timeout_s)
    found = {
        (number, place): answer for (number, place, _), answer in zip(engines, answers, strict=True)
    }
    return [
        [found[number, place] for place in range(len(part.specs))]
        for number, part in enumerate(parts)
    ]
