"""``dps-ray tune``: from a file and a run to thresholds, a bound and a picture."""

import json
from pathlib import Path

import pytest
import yaml

from dps_ray.bench import tune_input
from dps_ray.bench.tune_input import read_input
from dps_ray.cli.main import main

EXAMPLE = Path(tune_input.__file__).with_name("data") / "costs.yaml"
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
    options = {"restore_max_inflation": 0.2}
    summary.write_text(json.dumps({"elastic": elastic, "dps_options": options}))
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
    found = read_input(given, summary)
    assert found.switch_to_full_ms == 1000 * 2.0 / 4 * 0.2, "the run's own inflation"


def test_step_times_and_accuracy_come_from_benchmarks(tmp_path: Path) -> None:
    speed, layers, given = (tmp_path / f"{name}.json" for name in ("speed", "layers", "given"))
    rows = [
        {
            "model": model,
            "batch": batch,
            "tokens_per_s": {"full": {"median": full}, "fast": {"median": full * 2}},
        }
        for model, batch, full in (("a", 8, 400.0), ("a", 1, 100.0), ("b", 1, 7.0))
    ]
    speed.write_text(json.dumps({"rows": rows}))
    by_layers = [{"layers": n, "kl": {"median": kl}} for n, kl in ((0, 0.02), (30, 0.0))]
    layers.write_text(json.dumps({"by_layers": by_layers}))
    costs = yaml.safe_load(EXAMPLE.read_text())
    for field in ("step_full_ms", "step_fast_ms", "accuracy_ms"):
        del costs[field]
    given.write_text(json.dumps(costs | {"accuracy_ms_per_nat": 500}))
    found = read_input(given, None, speed, layers).costs
    assert found.step_full_ms == (10.0, 20.0)
    assert found.step_fast_ms == (5.0, 10.0)
    assert found.accuracy_ms == 10.0


def test_example_of_costs_can_be_tuned_as_it_stands() -> None:
    assert main(["tune", str(EXAMPLE)]) == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [("--speed", "has no decode speeds"), ("--layers", "has no divergence without full layers")],
)
def test_output_of_another_command_is_named_with_the_right_one(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"checks": {}}')
    assert main(["tune", str(costs), option, str(other)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accuracy_ms: -1\n", "accuracy_ms is -1: Input should be greater than or equal to 0"),
        ("step_fast_ms: 3\n", "step_fast_ms is 3"),
        ("total_blocks: 900\n", "total_blocks (900) must exceed base_blocks (1000)"),
        ("used_blocks: [[1, 2]]\n", "give either walk or used_blocks"),
        ("accuracy_ms: null\n", "give accuracy_ms, or accuracy_ms_per_nat"),
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


def test_an_edited_option_of_a_summary_is_one_line_with_the_field(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = tmp_path / "summary.json"
    elastic = {"switches_to_full": 1, "restore_busy_s": 1.0, "occupancy": {"period_s": 1}}
    options = {"restore_max_inflation": -1}
    summary.write_text(json.dumps({"elastic": elastic, "dps_options": options}))
    assert main(["tune", str(costs), "--summary", str(summary)]) == 2
    said = capsys.readouterr().err
    assert f"{summary}.dps_options.restore_max_inflation is -1" in said
    assert said.count("\n") == 1


def test_a_picture_without_a_folder_is_refused_before_the_work(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, why in ((tmp_path / "no" / "x.png", "there is no folder"), (tmp_path, "a folder")):
        assert main(["tune", str(costs), "--out", str(out)]) == 2
        said = capsys.readouterr()
        assert not said.out
        assert f"--out is {str(out)!r}" in said.err
        assert why in said.err
