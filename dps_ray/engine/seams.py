"""Replacing a class or function that a vLLM module names, where it offers no other seam."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType

import torch


@contextmanager
def swapped(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Let ``module.name`` be ``value`` inside the block."""
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)


def captures_beside_restores() -> AbstractContextManager[None]:
    """Let graphs be captured while the restore thread gives work to streams of its own.

    vLLM captures in torch's default way, in which a call of any thread may end the capture.
    """
    return swapped(
        torch.cuda, "graph", partial(torch.cuda.graph, capture_error_mode="thread_local")
    )
