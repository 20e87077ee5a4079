"""What stands in for CUDA graphs where there is no CUDA: only torch's capture and replay.

A capture notes the mode the layers ran in; a replay notes it again. Everything around it (vLLM's
wrappers, dispatchers, managers and forward contexts) is the real thing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import vllm.compilation.cuda_graph as wrappers
import vllm.compilation.monitor as monitor
import vllm.v1.worker.gpu.cudagraph_utils as managers
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from dps_ray.modes import Mode

POOL = "the one pool"
SIZES = [1, 2, 4, 8]
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class Recorder:
    """Modes of the forward passes that ran, in order, and of the graphs that were captured."""

    def __init__(self, mode_now: Callable[[], Mode]) -> None:
        self.mode_now = mode_now
        self.ran: list[Mode] = []
        self.captured: list[Mode] = []
        self.replayed: list[Mode] = []
        self.pools: set[str] = set()
        self.error_modes: list[str] = []

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """The model: it asks for the mode as a layer does."""
        self.ran.append(self.mode_now())
        return torch.empty(0)


class Graph:
    """Remembers the passes that ran during its capture."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.held: list[Mode] = []

    def replay(self) -> None:
        assert self.recorder is not None, "replayed before its capture"
        self.recorder.replayed += self.held


def install(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """Put the stand-ins into torch and vLLM for one test."""

    @contextmanager
    def capture(
        graph: Graph, pool: str, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        before = len(recorder.ran)
        yield
        graph.recorder, graph.held = recorder, recorder.ran[before:]
        recorder.captured += graph.held
        recorder.pools.add(pool)
        recorder.error_modes.append(capture_error_mode)

    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", POOL)
    for module in (wrappers, managers):
        monkeypatch.setattr(module, "current_stream", lambda: None)
    monkeypatch.setattr(managers, "graph_capture", lambda device: nullcontext())
    monkeypatch.setattr(managers, "is_global_first_rank", lambda: False)
