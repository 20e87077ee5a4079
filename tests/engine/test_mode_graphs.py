"""One set of CUDA graphs a mode, on vLLM's own dispatchers, wrappers and graph managers.

There is no GPU here: ``standin_graphs`` replaces torch's capture and replay, and nothing else.
"""

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.cudagraph_utils as managers
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import dps_ray.engine.gpu_runner_v1 as v1
from dps_ray.config import DpsOptions
from dps_ray.engine import rank as ranks
from dps_ray.engine.gpu_runner_v1 import DpsGpuModelRunnerV1, ModeDispatcher, with_mode
from dps_ray.engine.gpu_runner_v2 import DpsGraphManager
from dps_ray.modes import Mode

from .standin_graphs import POOL, Recorder, install
from .test_configure import engine_args

SIZES = [1, 2, 4, 8]
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


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


# --- V1 ------------------------------------------------------------------------------------------


def dispatcher(config: VllmConfig, capture: Any = "eager") -> ModeDispatcher:
    made = ModeDispatcher(config, capture)
    made.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)
    return made


def test_v1_every_key_exists_in_both_modes_and_stock_keys_are_the_same(
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
def test_v1_dispatch_is_the_stock_one_in_the_mode_of_the_step(
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


def test_v1_capture_order_does_not_depend_on_a_process(
    config: VllmConfig, rank: ranks.Rank
) -> None:
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


def test_v1_graphs_replay_the_mode_they_were_captured_in(
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


def test_v1_stock_capture_would_replay_the_wrong_mode(
    runner: Any, recorder: Recorder, rank: ranks.Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the mode set before a capture, graphs of both keys are full ones."""
    monkeypatch.setattr(
        DpsGpuModelRunnerV1, "_warmup_and_capture", GPUModelRunner._warmup_and_capture
    )
    made = runner("eager")
    made.capture_all()
    assert Mode.FAST not in recorder.captured


def test_v1_profiling_counts_both_modes_and_runs_fast_kernels_only(
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


def test_v1_lazy_graph_is_captured_before_the_step_after_the_one_that_missed_it(
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


# --- V2 ------------------------------------------------------------------------------------------


@pytest.fixture
def manager(
    config: VllmConfig, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(managers, "get_pp_group", lambda: group)
    monkeypatch.setattr(
        managers, "prepare_inputs_to_capture", lambda *_, **__: managers.AttentionState({}, {})
    )

    def make(capture: str, stock: bool = False) -> Any:
        options = {**config.additional_config["dps"], "graphs": capture}
        monkeypatch.setitem(config.additional_config, "dps", options)
        kind = managers.ModelCudaGraphManager if stock else DpsGraphManager
        return kind(config, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, 1)

    return make


def model_of(config: VllmConfig, recorder: Recorder) -> Any:
    """A compiled model: its pieces are wrapped, and it passes through them in any mode."""
    piece = CUDAGraphWrapper(recorder.forward, config, PIECEWISE)
    return lambda **_: piece()


def capture_with(made: Any, model: Any) -> None:
    buffers = SimpleNamespace(
        input_ids=torch.zeros(8), positions=torch.zeros(8), is_padding=torch.zeros(8)
    )
    state = SimpleNamespace(prepare_dummy_inputs=lambda *_: {})
    made.capture(model, state, buffers, None, None, [], None)


def step(made: Any, model: Any, config: VllmConfig, requests: int, tokens: int) -> Any:
    """Dispatch and run as the V2 runner does."""
    uniform = 1 if requests == tokens else None
    shape = made.dispatch(requests, tokens, uniform, num_active_loras=0, max_query_len=8)
    if shape.cg_mode is FULL:
        made.run_fullgraph(shape)
        return shape
    with set_forward_context(
        None, config, cudagraph_runtime_mode=shape.cg_mode,
        batch_descriptor=BatchDescriptor(num_tokens=shape.num_tokens),
    ):  # fmt: skip
        if shape.cg_mode is PIECEWISE:
            made.run_pw_graph(model, {})
        else:
            model()
    return shape


def test_v2_candidates_are_the_stock_ones_in_both_modes(
    config: VllmConfig, manager: Any, rank: ranks.Rank
) -> None:
    stock, ours = manager("eager", stock=True), manager("eager")
    for runtime_mode, shapes in stock._capture_descs.items():
        doubled = ours._capture_descs[runtime_mode]
        assert [shape.mode for shape in doubled] == list(Mode) * len(shapes)
        assert [shape.num_tokens for shape in doubled[::2]] == [s.num_tokens for s in shapes]
    stock._graphs_captured = ours._graphs_captured = True
    for requests, tokens in ((1, 1), (3, 3), (2, 7), (4, 8), (4, 9)):
        uniform = 1 if requests == tokens else None
        expected = stock.dispatch(requests, tokens, uniform, 0)
        for mode in Mode:
            rank.mode = mode
            found = ours.dispatch(requests, tokens, uniform, 0)
            assert (found.cg_mode, found.num_tokens, found.num_reqs) == (
                expected.cg_mode, expected.num_tokens, expected.num_reqs
            )  # fmt: skip
            assert found.cg_mode is NONE or found.mode is mode


def test_v2_graphs_replay_the_mode_they_were_captured_in(
    config: VllmConfig, manager: Any, recorder: Recorder, rank: ranks.Rank
) -> None:
    made, model = manager("eager"), model_of(config, recorder)
    made.choose_for_start()
    capture_with(made, model)
    assert Counter(recorder.captured) == {Mode.FULL: 7, Mode.FAST: 7}
    assert recorder.pools == {POOL}
    assert rank.mode is Mode.FULL
    for mode in (Mode.FULL, Mode.FAST, Mode.FULL):
        rank.mode = mode
        assert step(made, model, config, 3, 3).cg_mode is FULL
        assert step(made, model, config, 2, 7).cg_mode is PIECEWISE
    assert recorder.replayed == [
        *[Mode.FULL] * 2, *[Mode.FAST] * 2, *[Mode.FULL] * 2
    ]  # fmt: skip


def test_v2_profiling_counts_both_modes_and_runs_fast_kernels_only(
    config: VllmConfig, manager: Any, recorder: Recorder, rank: ranks.Rank
) -> None:
    rank.memory, rank.mode = None, Mode.FAST
    made = manager("lazy")
    made._max_full_descs_to_capture, made._capture_mem_samples = 2, None
    capture_with(made, model_of(config, recorder))
    assert len(made.graphs) == 2
    assert len(made._capture_descs[FULL]) == 6, "what vLLM multiplies the sample with"
    assert len(recorder.captured) == 8 + 2
    assert set(recorder.ran) == {Mode.FAST}


def test_v2_lazy_graph_is_captured_before_the_step_after_the_one_that_missed_it(
    config: VllmConfig, manager: Any, recorder: Recorder, rank: ranks.Rank
) -> None:
    made, model = manager("lazy"), model_of(config, recorder)
    made.choose_for_start()
    capture_with(made, model)
    assert Counter(recorder.captured) == {Mode.FULL: 7}
    assert not made.choose_missed()
    rank.mode = Mode.FAST
    for requests, tokens in ((3, 3), (2, 7)):
        assert step(made, model, config, requests, tokens).cg_mode is NONE
    assert not recorder.replayed
    assert made.choose_missed()
    capture_with(made, model)
    assert Counter(recorder.captured) == {Mode.FULL: 7, Mode.FAST: 2}
    for requests, tokens in ((3, 3), (2, 7)):
        step(made, model, config, requests, tokens)
    assert recorder.replayed == [Mode.FAST] * 2
