"""Tiny models, made once a session."""

from collections.abc import Callable
from pathlib import Path

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
