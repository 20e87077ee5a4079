"""The image's recipe: the versions of pyproject, and all files that the installation needs."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = {
    "dps_ray": "dps_ray",
    "dps_kernels": "kernels/dps_kernels",
    "dps_deployments": "deployments/dps_deployments",
    "dps_autoscaling": "autoscaling/dps_autoscaling",
}


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    """Each instruction and its arguments, continued lines joined."""
    lines = [line for line in dockerfile.splitlines() if line and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, arguments = line.partition(" ")
        yield name, arguments


@pytest.fixture(scope="module")
def recipe(root: Path) -> list[tuple[str, str]]:
    return list(instructions((root / "k8s/Dockerfile").read_text()))


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return found


@pytest.fixture(scope="module")
def copied(recipe: list[tuple[str, str]]) -> dict[str, str]:
    """Where each copied path goes, by its place in the repository."""
    found = {}
    for name, arguments in recipe:
        if name == "COPY":
            *sources, target = [each for each in arguments.split() if not each.startswith("--")]
            for source in sources:
                found[source] = target + source if target.endswith("/") else target
    return found


def test_base_image_holds_the_pinned_ray_and_a_python_that_the_project_allows(
    recipe: list[tuple[str, str]], project: dict[str, Any]
) -> None:
    (base,) = [arguments for name, arguments in recipe if name == "ARG"]
    match = re.fullmatch(r"BASE=rayproject/ray-llm:([\d.]+)-py3(\d+)-cu(\d\d)\d", base)
    assert match is not None
    ray, minor, cuda = match.groups()
    assert f"ray[llm]=={ray}" in project["optional-dependencies"]["gpu"]
    assert f"cuda-python>={cuda}" in project["optional-dependencies"]["gpu"]
    assert int(minor) >= int(project["requires-python"].removeprefix(">=3."))
    assert ("FROM", "${BASE}") in recipe


def test_image_installs_the_extra_that_pins_ray_and_vllm(recipe: list[tuple[str, str]]) -> None:
    (script,) = [arguments for name, arguments in recipe if name == "RUN"]
    commands = [shlex.split(command) for command in script.split("&&")]
    assert ["pip", "install", "--no-cache-dir", "--no-build-isolation", ".[gpu]"] in commands


def test_only_what_the_image_copies_is_sent_to_its_build(
    root: Path, copied: dict[str, str]
) -> None:
    lines = (root / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied)


def test_package_is_complete_when_made_from_the_copied_files_alone(
    root: Path, tmp_path: Path, copied: dict[str, str]
) -> None:
    leave = shutil.ignore_patterns("__pycache__", "*.so", "not_compiled.txt")
    image = tmp_path / "image"
    for source, target in copied.items():
        place = image / Path(target).relative_to("/home/ray/dps-ray")
        place.parent.mkdir(parents=True, exist_ok=True)
        if (root / source).is_dir():
            shutil.copytree(root / source, place, ignore=leave)
        else:
            shutil.copy(root / source, place)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")],
        cwd=image,
        check=True,
        capture_output=True,
        timeout=120,
    )
    for package, folder in PACKAGES.items():
        kept = {p.relative_to(root / folder) for p in (root / folder).rglob("*.*") if p.is_file()}
        wanted = {p for p in kept if p.suffix in {".csv", ".html", ".json", ".py", ".yaml"}}
        assert wanted
        assert [p for p in sorted(wanted) if not (tmp_path / "built" / package / p).is_file()] == []
    assert sorted(p.name for p in (image / "kernels/csrc").iterdir()) == sorted(
        p.name for p in (root / "kernels/csrc").iterdir()
    )


def test_readme_builds_the_image_that_the_overlay_names(
    root: Path, rayservice: dict[str, Any]
) -> None:
    worker = rayservice["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    image = worker["containers"][0]["image"]
    command = f"docker build -f k8s/Dockerfile -t {image} ."
    assert command in (root / "k8s/README.md").read_text()
