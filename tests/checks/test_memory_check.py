"""The memory check itself: it holds, and each way of searching can fail."""

import pytest

from dps_ray.checks.memory_check import check_memory
from dps_ray.checks.soak_rules import MUTANTS
from dps_ray.checks.soak_search import search
from dps_ray.cli.main import main


@pytest.mark.timeout(900)
def test_memory_survives_random_orders_and_no_safety_rule_can_be_removed() -> None:
    said: list[str] = []
    report = check_memory(operations=8_000, histories=20, seed=3, say=said.append)
    assert report.ok, said
    counts = report.figures["soak"]["counts"]
    assert sum(n for name, n in counts.items() if name.startswith("operation ")) == 8_000
    assert len(report.figures["mutants"]) == len(MUTANTS)


def test_the_search_finds_a_missing_rule() -> None:
    found = search(300, 0, MUTANTS["a unit is zeroed before its first KV write"])
    assert found is not None
    assert "of a lent unit is not zero" in found


def test_too_few_operations_are_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "memory", "--operations", "0"]) == 2
    assert "--operations is 0: give a whole number of at least 4" in capsys.readouterr().err
