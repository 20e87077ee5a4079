"""Tiny models, made once a session, and a front process on a machine with a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dps_ray.models.tiny import make_tiny

Tiny = Callable[..., Path]


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(models_root: Path) -> Tiny:
    """Folder of a tiny model: ``tiny("qwen3", dtype="bfloat16")``."""
    return lambda name, **options: make_tiny(name, models_root, **options)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front process that sees an NVIDIA GPU."""
    gpu = SimpleNamespace(
        device_type="cuda", device_name="cuda", is_rocm=lambda: False, is_cpu=lambda: False
    )
    monkeypatch.setattr("dps_ray.engine.configure.current_platform", gpu)
