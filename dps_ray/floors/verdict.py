"""What a fleet's answers under precision floors prove, beside those of a static 16-bit engine."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dps_ray.floors.clients import FULL_WAIT_S, TOKENS, Answer, Outcome
from dps_ray.report import Report, aligned

PATIENCE_S = 10.0
"""A refusal may come so long after its time. Of that most is the machine's: where five other busy
programs shared two cores, the latest was 5.5 s late."""
REASONS_SHOWN = 5
COLUMNS = ("floor", "requests", "tokens_full", "tokens_fast", "as_16_bit", "refusals", "slowest_s")

Tokens = Sequence[Sequence[int]]


def judge(
    report: Report,
    outcome: Outcome,
    reference: Tokens,
    max_tokens: int,
    patience_s: float = PATIENCE_S,
) -> None:
    """Fill in a report.

    Parameters
    ----------
    report
        Receives checks and figures.
    outcome
        What clients got and replicas counted.
    reference
        Tokens of the static 16-bit engine, by number of the prompt.
    max_tokens
        Tokens that each request asked for.
    patience_s
        Time beyond its own after which a refusal is too late, seconds.
    """
    numbered = list(enumerate(outcome.answers))
    insisting = [(n, a) for n, a in numbered if a.insists]
    others = [(n, a) for n, a in numbered if not a.insists]
    fast = [(n, a) for n, a in others if a.told_of("tokens_fast")]

    def equal(answers: Iterable[tuple[int, Answer]]) -> int:
        return sum(answer.tokens == list(reference[number]) for number, answer in answers)

    report.check(
        "no request hung or was lost", not any(answer.failure for answer in outcome.answers)
    )
    report.check(
        "every answer that insists on full precision is the static 16-bit engine's",
        bool(insisting) and equal(insisting) == len(insisting),
    )
    report.check(
        "each of them tells that all its tokens were made in full mode",
        all(a.told == {"tokens_full": max_tokens, "tokens_fast": 0} for _, a in insisting),
    )
    report.check(
        "every answer tells which mode made each of its tokens",
        all(
            a.told is not None and sum(a.told.values()) == len(a.tokens) == max_tokens
            for a in outcome.answers
        ),
    )
    report.check("what the answers tell is what the replicas counted", outcome.told_as_counted)
    report.check(
        "meanwhile every replica went fast",
        bool(outcome.replicas)
        and all(counted["switches_to_fast"] for counted in outcome.replicas.values()),
    )
    # Without a difference the comparison above could not tell fast mode from full.
    report.check(
        "answers made in fast mode differ from the 16-bit engine's", equal(fast) < len(fast)
    )
    refusals = [refusal for _, answer in insisting for refusal in answer.refusals]
    report.check(
        "every refusal came in its time and told when to come back",
        all(
            refusal.retry_after_s is not None and refusal.waited_s < FULL_WAIT_S + patience_s
            for refusal in refusals
        ),
    )

    def row(name: str, chosen: Callable[[Answer], bool]) -> dict[str, Any]:
        answers = [(n, a) for n, a in numbered if chosen(a)]
        return {
            "floor": name,
            "requests": len(answers),
            **{key: sum(a.told_of(key) for _, a in answers) for key in TOKENS},
            "as_16_bit": equal(answers),
            "refusals": sum(len(a.refusals) for _, a in answers),
            "slowest_s": round(max((a.took_s for _, a in answers), default=0.0), 2),
        }

    report.figures["floors"] = [
        row("full", lambda a: a.insists),
        row("any, all tokens full", lambda a: not a.insists and not a.told_of("tokens_fast")),
        row("any, some fast", lambda a: not a.insists and a.told_of("tokens_fast") > 0),
    ]
    report.figures["refusals"] = {
        "count": len(refusals),
        "requests": sum(bool(answer.refusals) for _, answer in insisting),
        "slowest_s": round(max((each.waited_s for each in refusals), default=0.0), 2),
    }
    report.figures["replicas"] = list(outcome.replicas.values())
    report.figures["load_s"] = round(outcome.took_s, 1)
    reasons = Counter(answer.failure for answer in outcome.answers if answer.failure)
    report.figures["failures"] = dict(reasons.most_common(REASONS_SHOWN))


def table(report: Report) -> str:
    """The requests by floor, one kind a line, and why some were not answered."""
    rows = [[str(kind[name]) for name in COLUMNS] for kind in report.figures["floors"]]
    lines = aligned([COLUMNS, *rows])
    switches = [counted["switches_to_fast"] for counted in report.figures["replicas"]]
    lines.append(
        f"{report.figures['load_s']:g} s of load; switches to fast mode by replica: {switches}; "
        f"slowest refusal {report.figures['refusals']['slowest_s']:g} s"
    )
    lines += [f"{count} x {reason}" for reason, count in report.figures["failures"].items()]
    return "\n".join(lines)
