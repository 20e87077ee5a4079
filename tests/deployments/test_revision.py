"""Which code runs: the same sources have the same name everywhere, edited ones another."""

import shutil
from importlib.metadata import version
from pathlib import Path

from dps_deployments.revision import digest_of, revision


def test_revision_names_the_release_and_the_sources() -> None:
    release, digest = revision().split("+")
    assert release == version("dps-ray")
    assert len(digest) == 8


def test_digest_changes_with_every_edit_new_name_or_new_file_and_with_nothing_else(
    tmp_path: Path,
) -> None:
    first = tmp_path / "one" / "package"
    (first / "inner").mkdir(parents=True)
    (first / "code.py").write_text("a = 1")
    (first / "inner" / "more.py").write_text("b = 2")
    before = digest_of([first])
    second = tmp_path / "two" / "package"
    shutil.copytree(first, second)
    (second / "notes.txt").write_text("no code")
    assert digest_of([second]) == before
    (second / "code.py").write_text("a = 3")
    edited = digest_of([second])
    (second / "code.py").rename(second / "renamed.py")
    renamed = digest_of([second])
    (second / "empty.py").touch()
    assert len({before, edited, renamed, digest_of([second])}) == 4
