"""Replacing a class or function that a vLLM module names, where it offers no other seam."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def swapped(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Let ``module.name`` be ``value`` inside the block."""
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)
