"""The kustomize layout: nothing missing, nothing left out, the same as kustomize makes it."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]
Render = Callable[[Path], list[Manifest]]


def kustomization_folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in (root / "k8s").rglob("kustomization.yaml"))


def files_named_in(folder: Path) -> set[Path]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    names = [*kustomization["resources"], *(p["path"] for p in kustomization.get("patches", []))]
    return {(folder / name).resolve() for name in names}


def by_identity(manifests: list[Manifest]) -> dict[tuple[str, str, str], Manifest]:
    return {(m["apiVersion"], m["kind"], m["metadata"]["name"]): m for m in manifests}


def test_every_path_in_a_kustomization_exists(root: Path) -> None:
    folders = kustomization_folders(root)
    assert len(folders) == 2
    for folder in folders:
        assert [path for path in files_named_in(folder) if not path.exists()] == []


def test_every_manifest_is_named_in_its_kustomization(root: Path) -> None:
    for folder in kustomization_folders(root):
        present = set(folder.glob("*.yaml")) - {folder / "kustomization.yaml"}
        assert present == {path for path in files_named_in(folder) if path.is_file()}


def test_rendering_holds_each_manifest_once(manifests: list[Manifest]) -> None:
    assert sorted(by_identity(manifests)) == [
        ("networking.k8s.io/v1", "NetworkPolicy", "dps"),
        ("policy/v1", "PodDisruptionBudget", "dps-head"),
        ("policy/v1", "PodDisruptionBudget", "dps-workers"),
        ("ray.io/v1", "RayService", "dps"),
    ]
    assert len(manifests) == 4


def test_patch_without_a_target_is_refused(
    render: Render, overlay_folder: Path, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "k8s", tmp_path / "k8s")
    folder = tmp_path / "k8s/overlays" / overlay_folder.name
    patch = folder / "serve-config.yaml"
    patch.write_text(patch.read_text().replace("name: dps", "name: renamed", 1))
    with pytest.raises(AssertionError, match=r"serve-config\.yaml matches 0 manifests"):
        render(folder)


def test_kustomize_renders_the_same(overlay_folder: Path, manifests: list[Manifest]) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(overlay_folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert by_identity(list(yaml.safe_load_all(done.stdout))) == by_identity(manifests)
