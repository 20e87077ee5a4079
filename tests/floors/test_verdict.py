"""The judgement of answers under precision floors: good ones pass, and each fault is named."""

from dataclasses import replace

import pytest

from dps_ray.floors.clients import Answer, Outcome, Refusal
from dps_ray.floors.verdict import judge, table
from dps_ray.report import Report

REFERENCE = [[1, 2, 3]] * 4


def outcome() -> Outcome:
    """Two who insist, one of them refused once, and two who do not, one of them served fast."""
    answers = [
        Answer(True, False, [1, 2, 3], {"tokens_full": 3, "tokens_fast": 0}),
        Answer(True, True, [1, 2, 3], {"tokens_full": 3, "tokens_fast": 0}, [Refusal(1.2, 2.0)]),
        Answer(False, False, [1, 2, 3], {"tokens_full": 3, "tokens_fast": 0}),
        Answer(False, True, [1, 5, 5], {"tokens_full": 1, "tokens_fast": 2}),
    ]
    counted = [
        {"tokens_full": 6, "tokens_fast": 1, "switches_to_fast": 1},
        {"tokens_full": 4, "tokens_fast": 1, "switches_to_fast": 2},
    ]
    return Outcome(answers, dict(zip("ab", counted, strict=True)), 1.0)


def failed(outcome: Outcome) -> list[str]:
    report = Report("check floors")
    judge(report, outcome, REFERENCE, 3)
    table(report)
    return [name for name, passed in report.checks.items() if not passed]


def test_fleet_that_keeps_its_word_passes() -> None:
    assert failed(outcome()) == []


def test_table_has_a_line_for_each_kind_of_answer() -> None:
    report = Report("check floors")
    judge(report, outcome(), REFERENCE, 3)
    assert [line.split() for line in table(report).splitlines()[1:4]] == [
        ["full", "2", "6", "0", "2", "1", "0.0"],
        ["any,", "all", "tokens", "full", "1", "3", "0", "1", "0", "0.0"],
        ["any,", "some", "fast", "1", "1", "2", "0", "0", "0.0"],
    ]


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (0, {"tokens": [1, 2, 4]}, "is the static 16-bit engine's"),
        (1, {"told": {"tokens_full": 2, "tokens_fast": 1}}, "all its tokens were made in full"),
        (1, {"told": None}, "all its tokens were made in full"),
        (2, {"told": {"tokens_full": 2, "tokens_fast": 0}}, "which mode made each"),
        (2, {"tokens": [1, 2]}, "which mode made each"),
        (2, {"failure": "hung"}, "no request hung or was lost"),
        (3, {"told": {"tokens_full": 2, "tokens_fast": 1}}, "what the replicas counted"),
        (3, {"tokens": [1, 2, 3]}, "differ from the 16-bit engine's"),
        (1, {"refusals": [Refusal(1.2, None)]}, "every refusal came in its time"),
        (1, {"refusals": [Refusal(12.0, 2.0)]}, "every refusal came in its time"),
    ],
)
def test_each_fault_fails_a_check_of_its_own(
    number: int, change: dict[str, object], words: str
) -> None:
    bad = outcome()
    bad.answers[number] = replace(bad.answers[number], **change)
    assert any(words in name for name in failed(bad))


def test_replica_that_never_went_fast_proves_nothing() -> None:
    bad = outcome()
    bad.replicas["b"]["switches_to_fast"] = 0
    assert failed(bad) == ["meanwhile every replica went fast"]
