"""``dps-ray check memory``: no history of orders loses a byte, and every safety rule is needed."""

import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

from dps_ray.checks.soak_process import ProcessDiedError, run_apart
from dps_ray.checks.soak_rules import MUTANTS
from dps_ray.checks.soak_run import SoakOutcome, run_soak
from dps_ray.config import DpsConfigError
from dps_ray.memory.region import Binding
from dps_ray.report import Report

BINDINGS: tuple[Binding, ...] = get_args(Binding)
MUTANT_OPERATIONS = 200_000
"""A mutant that lives this long counts as survived."""
PIECES = 2
"""Soaks per binding, of different seeds: all layers return at once, or one by one."""
LEAST_OPERATIONS = PIECES * len(BINDINGS)
"""One for each soak."""
QUEUED_PIECES = (1, 2)
"""Those on links that run late: one of each binding, one of each way to return."""


def check_memory(
    *, operations: int, histories: int, seed: int, say: Callable[[str], None]
) -> Report:
    """Soak the memory of an engine, alone and with each safety rule removed.

    Parameters
    ----------
    operations
        Random operations of the soak, over both bindings together: ``LEAST_OPERATIONS`` or more.
    histories
        Random histories that Hypothesis searches, a binding drawn for each; 0 for none.
    seed
        Of everything random.
    say
        Receives a line as each part ends.

    Raises
    ------
    DpsConfigError
        Hypothesis is not installed.
    """
    pieces = LEAST_OPERATIONS
    report = Report("check memory", {"seed": seed})
    with ThreadPoolExecutor(2) as pool:
        soaks = [
            pool.submit(
                _outcome, operations // pieces + (piece < operations % pieces),
                seed + piece, BINDINGS[piece % len(BINDINGS)], by_layer=piece >= len(BINDINGS),
                queued_link=piece in QUEUED_PIECES,
            )
            for piece in range(pieces)
        ]  # fmt: skip
        mutants = {
            rule: pool.submit(
                _outcome, MUTANT_OPERATIONS, seed, rules.binding, rules,
                queued_link=rules.queued_link,
            )
            for rule, rules in MUTANTS.items()
        }  # fmt: skip
        searched = pool.submit(run_apart, _search, histories, seed) if histories else None
        _judge_soak(report, [soak.result() for soak in soaks], operations, say)
        _judge_mutants(report, {rule: run.result() for rule, run in mutants.items()}, say)
        if searched is not None:
            broken = searched.result()
            report.check(f"{histories} searched histories: no invariant broken", broken is None)
            report.figures["histories"] = {"searched": histories, "broken": broken}
            say(f"histories: {histories} searched" + (f"; {broken}" if broken else ""))
    return report


def _outcome(*arguments: Any, **options: Any) -> SoakOutcome:
    """What ``run_soak`` returns. A soak that reads memory which is not mapped dies instead."""
    try:
        return run_apart(run_soak, *arguments, **options)
    except ProcessDiedError as error:
        if error.signal not in (signal.SIGSEGV, signal.SIGBUS):
            raise
        return SoakOutcome(None, broken=str(error))


def _judge_soak(
    report: Report, outcomes: list[SoakOutcome], operations: int, say: Callable[[str], None]
) -> None:
    done = sum(outcome.operations or 0 for outcome in outcomes)
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    broken = [outcome.broken for outcome in outcomes if outcome.broken]
    report.check(f"soak: {operations} operations without a broken invariant",
                 not broken and done == operations)  # fmt: skip
    for happened in (
        "units lent",
        "blocks moved",
        "prefixes saved",
        "restores completed",
        "restores cancelled",
        "restores failed",
        "restores stopped",
        "bytes copied between steps",
        "bytes not copied again",
        "held copies disturbed",
        "fast steps with full layers",
    ):
        report.check(f"soak: {happened} at least once", counts[happened] > 0)
    report.figures["soak"] = {
        "operations": done,
        "counts": dict(sorted(counts.items())),
        "broken": broken,
    }
    say(f"soak: {done} operations, {counts['blocks allocated']} KV blocks allocated")
    for name, number in sorted(counts.items()):
        say(f"  {number:>10}  {name}")
    for text in broken:
        say(f"  broken: {text}")


def _judge_mutants(
    report: Report, outcomes: dict[str, SoakOutcome], say: Callable[[str], None]
) -> None:
    table: list[dict[str, Any]] = []
    say("mutants: each rule removed, and after how many operations the soak failed")
    for rule, outcome in outcomes.items():
        report.check(f"without the rule that {rule}, the soak fails", outcome.broken is not None)
        symptom = (outcome.broken or "survived").splitlines()[0][:160]
        table.append({"rule": rule, "operations": outcome.operations, "symptom": symptom})
        say(f"  {outcome.operations or '?':>7}  {rule}: {symptom}")
    report.figures["mutants"] = table


def _search(histories: int, seed: int) -> str | None:
    try:
        from dps_ray.checks.soak_search import search
    except ModuleNotFoundError as error:
        raise DpsConfigError(
            f"histories is {histories} but {error.name} is not installed: install dps-ray[dev], "
            "or give 0"
        ) from None
    return search(histories, seed)
