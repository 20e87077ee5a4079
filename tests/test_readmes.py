"""The READMEs are maps: each names all that its room holds, and nothing that is not there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("autoscaling", "deployments", "dps_ray", "k8s", "kernels")
SOURCES = {".cpp", ".h", ".html", ".inl", ".py"}
NAMED = re.compile(r"(?<![\w*-])[\w./-]+\.(?:cpp|h|html|inl|py)(?!\w)")
LINK = re.compile(r"\]\(([^)#:]+)[^):]*\)")


def readmes(root: Path) -> list[Path]:
    """The root's, and one for each room that has one."""
    rooms = (root / name for name in ROOMS)
    return [root / "README.md", *sorted(p for room in rooms for p in room.rglob("README.md"))]


def sources_of(readme: Path) -> Iterator[Path]:
    """Source files whose nearest README this is, but for what only makes a folder a package."""
    for path in sorted(readme.parent.rglob("*")):
        if path.suffix in SOURCES and path.name != "__init__.py":
            nearest = next(f for f in path.parents if (f / "README.md").is_file())
            if nearest == readme.parent:
                yield path


def unnamed(readme: Path) -> list[str]:
    """Files of the room that its README does not name."""
    names = {Path(name).name for name in NAMED.findall(readme.read_text())}
    return [path.name for path in sources_of(readme) if path.name not in names]


def missing(readme: Path, root: Path) -> list[str]:
    """What the README names or links to and nobody finds."""
    text = readme.read_text()
    folders = [root / name for name in (*ROOMS, "tests")]
    files = [path.as_posix() for folder in folders for path in folder.rglob("*.*")]
    names = [name for name in NAMED.findall(text) if not (root / name).is_file()]
    links = [link for link in LINK.findall(text) if not (readme.parent / link).exists()]
    return [name for name in names if not any(f.endswith(f"/{name}") for f in files)] + links


@pytest.fixture(params=readmes(ROOT), ids=lambda path: str(path.relative_to(ROOT).parent))
def readme(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_readme_of_a_room_names_all_its_files(readme: Path) -> None:
    if readme.parent != ROOT:
        assert unnamed(readme) == []


def test_readme_names_only_what_is_there(readme: Path) -> None:
    assert missing(readme, ROOT) == []


def test_every_room_is_linked_from_a_room_above_it(readme: Path) -> None:
    above = [folder / "README.md" for folder in readme.parent.parents]
    linked = [
        (page.parent / link).resolve()
        for page in above
        if page.is_file()
        for link in LINK.findall(page.read_text())
    ]
    assert readme.parent == ROOT or readme in linked


def test_root_readme_names_every_folder_of_code() -> None:
    text = (ROOT / "README.md").read_text()
    folders = [ROOT / name for name in ROOMS]
    folders += [path.parent for path in sorted((ROOT / "dps_ray").glob("*/__init__.py"))]
    names = [path.relative_to(ROOT).as_posix() for path in folders]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_missing_and_invented_names_are_found(tmp_path: Path) -> None:
    room = tmp_path / "kernels"
    (room / "inner").mkdir(parents=True)
    for name in ("README.md", "named.py", "layers.py", "inner/deep.cpp", "__init__.py"):
        (room / name).touch()
    readme = room / "README.md"
    readme.write_text("`named.py`, `sub_layers.py`; `report.hung_after_s`; [a](gone.md#there)")
    assert unnamed(readme) == ["deep.cpp", "layers.py"]
    assert missing(readme, tmp_path) == ["sub_layers.py", "gone.md"]
