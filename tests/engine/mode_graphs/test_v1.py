"""One set of CUDA graphs a mode, on the V1 runner's own dispatcher and wrappers.

There is no GPU here: ``standin_graphs`` replaces torch's capture and replay, and nothing else.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import dps_ray.engine.gpu_runner_v1 as v1
from dps_ray.engine import rank as ranks
from dps_ray.engine.gpu_runner_v1 import DpsGpuModelRunnerV1, ModeDispatcher, with_mode
from dps_ray.modes import Mode

from .standin_graphs import FULL, NONE, PIECEWISE, POOL, SIZES, Recorder


def dispatcher(config: VllmConfig, capture: Any = "eager") -> ModeDispatcher:
    made = ModeDispatcher(config, capture)
    made.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)
    return made


def test_every_key_exists_in_both_modes_and_stock_keys_are_the_same(
    config: VllmConfig, rank: ranks.Rank
) -> None:
    stock = v1.CudagraphDispatcher(config)
    stock.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)
    ours = dispatcher(config)
    assert sum(map(len, stock.cudagraph_keys.values())) == 7
    for runtime_mode, keys in stock.cudagraph_keys.items():
        expected = {with_mode(key, mode) for key in keys for mode in Mode}
        assert ours.cudagraph_keys[runtime_mode] == expected
        assert len(expected) == 2 * len(keys)


@pytest.mark.parametrize(
    ("tokens", "uniform"),
    [(1, True), (3, True), (4, True), (1, False), (3, False), (4, False), (7, False), (9, False)],
)
def test_dispatch_is_the_stock_one_in_the_mode_of_the_step(
    config: VllmConfig, rank: ranks.Rank, tokens: int, uniform: bool
) -> None:
    stock = v1.CudagraphDispatcher(config)
    stock.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)
    runtime_mode, key = stock.dispatch(tokens, uniform_decode=uniform)
    ours = dispatcher(config)
    for mode in Mode:
        rank.mode = mode
        found = ours.dispatch(tokens, uniform_decode=uniform)
        assert found == (runtime_mode, key if runtime_mode is NONE else with_mode(key, mode))


def test_capture_order_does_not_depend_on_a_process(config: VllmConfig, rank: ranks.Rank) -> None:
    """Ranks capture together: a set's order, which each process draws anew, must not show."""
    orders = []
    for seed in range(2):
        ours = dispatcher(config)
        for runtime_mode, keys in ours.cudagraph_keys.items():
            ordered = sorted(keys, key=lambda key: hash((key, seed)))
            ours.cudagraph_keys[runtime_mode] = ordered  # type: ignore[assignment]
        orders.append(ours.get_capture_descs())
    assert orders[0] == orders[1]
    assert [runtime_mode for runtime_mode, _ in orders[0]] == [PIECEWISE, FULL]
    piecewise = [(key.num_tokens, key.mode) for key in orders[0][0][1]]
    assert piecewise == [(size, mode) for size in reversed(SIZES) for mode in Mode]


class Runner(DpsGpuModelRunnerV1):
    """The runner's capture methods around a model that is a stand-in; no device, no buffers."""

    def __init__(self, config: VllmConfig, recorder: Recorder, capture: Any) -> None:
        self.vllm_config = config
        self.compilation_config = config.compilation_config
        self.parallel_config = config.parallel_config
        self.load_config = config.load_config
        self.lora_config = None
        self.device = torch.device("cpu")
        self.cudagraph_dispatcher = dispatcher(config, capture)
        self.model = CUDAGraphWrapper(recorder.forward, config, FULL)
        self.piece = CUDAGraphWrapper(recorder.forward, config, PIECEWISE)

    def _dummy_run(
        self, num_tokens: int, cudagraph_runtime_mode: Any = None, uniform_decode: bool = False,
        **_: Any,
    ) -> Any:  # fmt: skip
        eager = {NONE} if cudagraph_runtime_mode is NONE else None
        found, key = self.cudagraph_dispatcher.dispatch(
            num_tokens, uniform_decode=uniform_decode, valid_modes=eager
        )
        assert cudagraph_runtime_mode in (None, found)
        with set_forward_context(
            None, self.vllm_config, cudagraph_runtime_mode=found, batch_descriptor=key
        ):
            return (self.piece if found is PIECEWISE else self.model)()

    def capture_all(self) -> None:
        for runtime_mode, keys in self.cudagraph_dispatcher.get_capture_descs():
            self._capture_cudagraphs(keys, runtime_mode)


@pytest.fixture
def runner(
    config: VllmConfig, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setattr("vllm.v1.worker.gpu_model_runner.is_global_first_rank", lambda: False)
    monkeypatch.setattr(v1, "graph_capture", lambda device: nullcontext())
    config.compilation_config.cudagraph_num_of_warmups = 1
    return lambda capture: Runner(config, recorder, capture)


def test_graphs_replay_the_mode_they_were_captured_in(
    runner: Any, recorder: Recorder, rank: ranks.Rank
) -> None:
    made = runner("eager")
    made.capture_all()
    assert Counter(recorder.captured) == {Mode.FULL: 7, Mode.FAST: 7}
    assert recorder.pools == {POOL}
    assert rank.mode is Mode.FULL, "capture must not change the mode of the steps"
    for mode in (Mode.FULL, Mode.FAST, Mode.FULL):
        rank.mode = mode
        made._dummy_run(4, uniform_decode=True)
        made._dummy_run(7)
    assert recorder.replayed == [
        *[Mode.FULL] * 2, *[Mode.FAST] * 2, *[Mode.FULL] * 2
    ]  # fmt: skip


def test_stock_capture_would_replay_the_wrong_mode(
    runner: Any, recorder: Recorder, rank: ranks.Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the mode set before a capture, graphs of both keys are full ones."""
    monkeypatch.setattr(
        DpsGpuModelRunnerV1, "_warmup_and_capture", GPUModelRunner._warmup_and_capture
    )
    made = runner("eager")
    made.capture_all()
    assert Mode.FAST not in recorder.captured


def test_profiling_counts_both_modes_and_runs_fast_kernels_only(
    runner: Any, recorder: Recorder, rank: ranks.Rank
) -> None:
    rank.memory, rank.mode = None, Mode.FAST
    made = runner("lazy")
    for runtime_mode, keys in made.cudagraph_dispatcher.get_capture_descs():
        for key in keys[:2]:
            made._warmup_and_capture(key, cudagraph_runtime_mode=runtime_mode)
    assert len(recorder.captured) == 4, "the second sample is a capture, not a replay"
    assert set(recorder.ran) == {Mode.FAST}, "the residual has no memory to read yet"
    assert [len(keys) for _, keys in made.cudagraph_dispatcher.get_capture_descs()] == [8, 6]


def test_lazy_graph_is_captured_before_the_step_after_the_one_that_missed_it(
    runner: Any, recorder: Recorder, rank: ranks.Rank
) -> None:
    made = runner("lazy")
    made.capture_all()
    assert Counter(recorder.captured) == {Mode.FULL: 7}
    made.capture_missed()
    rank.mode = Mode.FAST
    made._dummy_run(4, uniform_decode=True)
    assert recorder.ran[-1] is Mode.FAST
    assert not recorder.replayed, "there is no graph yet: the step ran without one"
    made.capture_missed()
    assert Counter(recorder.captured) == {Mode.FULL: 7, Mode.FAST: 1}
    assert recorder.error_modes[-2:] == ["global", "thread_local"], "a restore may be running"
    made._dummy_run(4, uniform_decode=True)
    assert recorder.replayed == [Mode.FAST]
    made.capture_missed()
    assert len(recorder.captured) == 8
