"""One set of CUDA graphs a mode, on the V2 runner's own graph manager.

There is no GPU here: ``standin_graphs`` replaces torch's capture and replay, and nothing else.
"""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.cudagraph_utils as managers
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context

from dps_ray.engine import rank as ranks
from dps_ray.engine.gpu_runner_v2 import DpsGraphManager
from dps_ray.modes import Mode

from .standin_graphs import FULL, NONE, PIECEWISE, POOL, Recorder


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


def test_candidates_are_the_stock_ones_in_both_modes(
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


def test_graphs_replay_the_mode_they_were_captured_in(
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


def test_profiling_counts_both_modes_and_runs_fast_kernels_only(
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


def test_lazy_graph_is_captured_before_the_step_after_the_one_that_missed_it(
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
