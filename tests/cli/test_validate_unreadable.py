"""``dps-ray validate`` on files that are no configuration at all: one line each, with its place."""

from pathlib import Path

import pytest

from dps_ray.cli.main import main

ALIASES = "a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(60))
UNREADABLE = [
    ("a: [\n", "broken.yaml:2: the file is not YAML, line 2: while parsing"),
    ("applications: &all\n- name: x\n  args: *all\n", ":3: the file is not YAML, line 3: *all st"),
    ("a: &a\n  b: &b [1,\n   *a]\n", "*a stands inside of what &a names: remove one of the two"),
    ("[" * 2000 + "]" * 2000, "broken.yaml:1: the file is nested too deeply to be read: flatten"),
    ("", "broken.yaml:1: the file is no mapping: it needs 'applications'"),
    # Read node by node, this would be 2 ** 60 of them.
    (ALIASES, "broken.yaml:1: a0 is not an option: remove it"),
    ("applications: []\n", "broken.yaml:1: applications is []: name at least one"),
]


@pytest.mark.parametrize(("text", "message"), UNREADABLE, ids=[row[1] for row in UNREADABLE])
def test_file_without_a_configuration_is_named_and_hides_no_other(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, other = tmp_path / "broken.yaml", tmp_path / "other.yaml"
    broken.write_text(text)
    other.write_text("applcations: 1\n")
    files = [broken, tmp_path / "missing.yaml", other]
    assert main(["validate", *map(str, files)]) == 1
    said = capsys.readouterr().out
    assert message in said
    assert "missing.yaml:1: the file cannot be read: No such file" in said
    assert "other.yaml:1: applcations is not an option: did you mean 'applications'?" in said
    assert all(f"FAIL {file}" in said for file in files)
