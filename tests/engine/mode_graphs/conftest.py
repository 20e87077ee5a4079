"""An elastic engine's configuration and rank, and torch's graphs replaced by a record of them."""

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig

from dps_ray.config import DpsOptions
from dps_ray.engine import rank as ranks
from dps_ray.modes import Mode

from ..test_configure import engine_args
from .standin_graphs import SIZES, Recorder, install


@pytest.fixture(scope="module")
def config(tiny: Any) -> VllmConfig:
    """An elastic engine's configuration, with graphs as a GPU platform would have them."""
    config = engine_args(tiny("qwen3"), max_num_seqs=4).create_engine_config()
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.splitting_ops = list(compilation._attention_ops)
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = SIZES
    compilation.max_cudagraph_capture_size = SIZES[-1]
    return config


@pytest.fixture
def rank() -> Iterator[ranks.Rank]:
    """A rank whose region stands."""
    rank = ranks.begin(DpsOptions(key=uuid.uuid4().hex[:16]), 0, torch.device("cpu"))
    rank.memory = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    rank.mode = Mode.FULL
    yield rank
    rank.close()
    rank._page.remove()


@pytest.fixture
def recorder(rank: ranks.Rank, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(lambda: rank.mode)
    install(monkeypatch, recorder)
    return recorder
