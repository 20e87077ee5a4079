"""Render the overlays in Python: the part of kustomize that ``k8s/`` uses, and no more.

It lets every check run where kubectl is not installed; where it is, a test compares the two.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = "qwen3-30b-a3b"
KNOWN_FIELDS = {"apiVersion", "kind", "resources", "patches", "images"}
"""A kustomization that uses anything else needs it here first."""

Manifest = dict[str, Any]


def load_kustomization(folder: Path) -> Manifest:
    kustomization: Manifest = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = kustomization.keys() - KNOWN_FIELDS
    assert not unknown, f"{folder} uses {sorted(unknown)}, which this renderer does not know"
    return kustomization


def load_manifests(path: Path) -> list[Manifest]:
    """Read every document of a file; a YAML alias becomes a copy, as it does in kustomize."""
    text = path.read_text()
    return [json.loads(json.dumps(manifest)) for manifest in yaml.safe_load_all(text)]


def build(folder: Path) -> list[Manifest]:
    kustomization = load_kustomization(folder)
    manifests: list[Manifest] = []
    for name in kustomization["resources"]:
        path = folder / name
        manifests += build(path) if path.is_dir() else load_manifests(path)
    for entry in kustomization.get("patches", []):
        patch = yaml.safe_load((folder / entry["path"]).read_text())
        targets = [m for m in manifests if is_target(m, entry.get("target") or identity(patch))]
        assert len(targets) == 1, f"{entry['path']} matches {len(targets)} manifests"
        if isinstance(patch, list):
            for operation in patch:
                add(targets[0], operation)
        else:
            merge(targets[0], patch)
    for image in kustomization.get("images", []):
        set_image(manifests, image)
    return manifests


def identity(patch: Manifest) -> Manifest:
    group, _, version = patch["apiVersion"].partition("/")
    return {
        "group": group,
        "version": version,
        "kind": patch["kind"],
        "name": patch["metadata"]["name"],
    }


def is_target(manifest: Manifest, target: Manifest) -> bool:
    return identity(manifest) == target


def merge(into: Manifest, patch: Manifest) -> None:
    """Merge maps and replace the rest: what kustomize does to a kind it has no schema of."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def add(document: Any, operation: Manifest) -> None:
    """Apply RFC 6902's ``add`` of a map member, the only operation the overlays use."""
    assert operation["op"] == "add", f"operation {operation['op']} is not known to this renderer"
    *parents, last = operation["path"].removeprefix("/").split("/")
    for part in parents:
        document = document[int(part) if isinstance(document, list) else part]
    assert isinstance(document, dict), f"{operation['path']} does not end in a map"
    document[last] = operation["value"]


def set_image(node: Any, image: Manifest) -> None:
    if isinstance(node, list):
        for item in node:
            set_image(item, image)
    elif isinstance(node, dict):
        for container in node.get("containers") or []:
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
        for value in node.values():
            set_image(value, image)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def overlay_folder() -> Path:
    return ROOT / "k8s/overlays" / OVERLAY


@pytest.fixture(scope="session")
def render() -> Callable[[Path], list[Manifest]]:
    return build


@pytest.fixture
def manifests(overlay_folder: Path) -> list[Manifest]:
    return build(overlay_folder)


@pytest.fixture
def rayservice(manifests: list[Manifest]) -> Manifest:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == "RayService"]
    return found


@pytest.fixture(scope="session")
def serve_config_text() -> str:
    return (ROOT / "deployments/configs" / f"{OVERLAY}.yaml").read_text()


@pytest.fixture(scope="session")
def serve_config(serve_config_text: str) -> Manifest:
    config: Manifest = yaml.safe_load(serve_config_text)
    return config


@pytest.fixture(scope="session")
def embedder() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "embed_serve_config", ROOT / "k8s/embed_serve_config.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
