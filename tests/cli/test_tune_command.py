"""``dps-ray tune``: from a file and a run to thresholds, a bound and a picture."""

import json
from pathlib import Path

import pytest

from dps_ray.cli.main import main

COSTS = """
base_blocks: 1000
total_blocks: 1600
period_s: 0.5
step_full_ms: [18, 30]
step_fast_ms: [14, 24]
preemption_ms_per_block: 10
accuracy_ms: 8
switch_to_full_ms: 300
walk: {step_blocks: 16, up: 0.2, down: 0.3, burst: 0.02, burst_blocks: 400}
"""


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    file = tmp_path / "costs.yaml"
    file.write_text(COSTS)
    return file


def test_thresholds_bound_and_picture_come_from_one_command(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "policy.png"
    words = ["tune", str(costs), "--json", "--compare", "0.9,0.3", "--out", str(picture)]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["violated_assumptions"] == []
    assert found["watermarks"]["low"] < found["watermarks"]["high"] <= 1.0
    assert set(found["comparisons"]) == {"tuned", "default", "0.9,0.3"}
    for compared in found["comparisons"].values():
        assert 0.0 <= compared["loss"] <= compared["bound"]
    assert found["comparisons"]["tuned"]["loss"] <= found["comparisons"]["default"]["loss"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_demos_summary_fills_in_what_it_has_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elastic = {
        "switches_to_full": 4,
        "restore_busy_s": 2.0,
        "occupancy": {
            "period_s": 0.5,
            "base_blocks": 40,
            "total_blocks": 100,
            "used_blocks": [[3, 10, 38, 70, 66, 30, 12, 4, 2, 2], [0, 0, 5, 6, 40, 41, 20]],
        },
    }
    summary, given = tmp_path / "summary.json", tmp_path / "costs.json"
    summary.write_text(json.dumps({"elastic": elastic}))
    given.write_text(
        json.dumps(
            {
                "step_full_ms": [18, 30], "step_fast_ms": [14, 24],
                "preemption_ms_per_block": 50, "accuracy_ms": 8,
            }
        )
    )  # fmt: skip
    assert main(["tune", str(given), "--summary", str(summary), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checks"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accuracy_ms: -1\n", "accuracy_ms is -1: Input should be greater than or equal to 0"),
        ("step_fast_ms: 3\n", "step_fast_ms is 3"),
        ("total_blocks: 900\n", "total_blocks (900) must exceed base_blocks (1000)"),
        ("used_blocks: [[1, 2]]\n", "give either walk or used_blocks"),
        ("preemtion: 3\n", "preemtion is not an option"),
        ("walk: {step_blocks: 16, up: 0.9, down: 0.9}\n", "no chances that sum to 1"),
        ("- 3\n", "cannot be read"),
        ("1: 2\n", "1 is 1: Keys should be strings"),
    ],
)
def test_impossible_costs_are_one_line_with_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "costs.yaml"
    file.write_text(COSTS + text)
    assert main(["tune", str(file)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_summary_without_occupancy_is_named(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "summary.json"
    other.write_text("{}")
    assert main(["tune", str(costs), "--summary", str(other)]) == 2
    assert "has no elastic.occupancy" in capsys.readouterr().err
    other.write_text('{"elastic": {"occupancy": {"period_s": 1}}}')
    assert main(["tune", str(costs), "--summary", str(other)]) == 2
    assert "has no elastic.switches_to_full" in capsys.readouterr().err
