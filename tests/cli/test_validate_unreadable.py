"""``dps-ray validate`` on files that are no configuration at all: one line, with its place."""

from pathlib import Path

import pytest

from dps_ray.cli.main import main


def test_file_that_is_not_yaml_ends_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("applications: [\n")
    assert main(["validate", str(file)]) == 2
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: &all\n- name: x\n  args: *all\n", "*all stands inside of what &all"),
        ("a: &a\n  b: &b [1,\n   *a]\n", "*a stands inside of what &a"),
    ],
)
def test_alias_that_refers_to_itself_is_named_with_its_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "circle.yaml"
    file.write_text(text)
    assert main(["validate", str(file)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "line 3" in said


def test_file_that_is_nested_too_deeply_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text("[" * 2000 + "]" * 2000)
    assert main(["validate", str(file)]) == 2
    assert "nested too deeply" in capsys.readouterr().err
