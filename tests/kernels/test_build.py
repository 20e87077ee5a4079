"""A failed build leaves its reason in the package; a later good one takes it away."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASK = "import dps_kernels; print(dps_kernels.available())"
STAND_IN = """#!/bin/sh
# A compiler in name: it leaves an empty file where its output should be.
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The build's inputs by themselves: a failed build removes the compiled library."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    # Tests beside this one may be writing what they compiled of the package's modules.
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=ignored)
    return tmp_path


def build(tree: Path, compiler: str) -> None:
    # In this process's environment g++ may be named differently for C, C++ and linking.
    names = dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), compiler)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env={**os.environ, **names},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def asked(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "kernels")},
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_first_call_says_why_the_kernels_were_not_compiled(tree: Path) -> None:
    build(tree, "/bin/false")
    answer = asked(tree)
    assert answer.stdout.strip() == "False"
    assert "was not built: compiling failed (command '/bin/false' failed" in answer.stderr
    assert "install g++ 11 or newer" in answer.stderr
    compiler = tree / "compiler"
    compiler.write_text(STAND_IN)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    build(tree, str(compiler))
    assert not list((tree / "kernels" / "dps_kernels").glob("not_compiled*"))
    assert "does not load" in asked(tree).stderr
