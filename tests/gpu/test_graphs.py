"""Real CUDA graphs, one set a mode, on vLLM's V1 and V2 runners.

What the engine does around a capture is tested without a GPU in ``tests/engine/mode_graphs``;
here real graphs are captured and replayed, and must give what the same engine gives without them.
"""

from statistics import fmean
from typing import Any

import pytest

from dps_ray.checks.process import run_engines
from tests.gpu.engines import GRAPHS, MODELS, lending, switching, without_graphs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

RUNNERS = {"V1": "0", "V2": "1"}

SAME_MODE = 0.25
"""Runs of a mode are nearer to each other than this share of the distance between the modes. Graphs
and eager runs differ in last bits: batches are padded, and the compiler joins operations."""


def distance(run: dict[str, Any], other: dict[str, Any]) -> float:
    """Mean difference of the logprobs that both runs give after the same tokens."""
    differences = []
    for mine, theirs, mine_at, theirs_at in zip(
        run["tokens"], other["tokens"], run["logprobs"], other["logprobs"], strict=True
    ):
        for step, (a, b) in enumerate(zip(map(dict, mine_at), map(dict, theirs_at), strict=True)):
            if mine[:step] != theirs[:step]:
                break
            differences += [
                abs(float.fromhex(a[token]) - float.fromhex(b[token])) for token in a.keys() & b
            ]
    return fmean(differences)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_a_mode_compute_in_that_mode(
    runner: str, graphs: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
    captured = switching(name, graphs)
    with_graphs, eager = run_engines([captured, without_graphs(captured)], 900.0)
    between_modes = distance(eager["full"], eager["fast"])
    for mode in ("full", "fast", "full again"):
        apart = distance(with_graphs[mode], eager[mode])
        print(f"{mode}: graphs are {apart:.2g} from eager, the modes {between_modes:.2g}")
        assert apart < SAME_MODE * between_modes
        assert with_graphs[mode]["nans"] == 0
    assert with_graphs["full"]["logprobs"] == with_graphs["full again"]["logprobs"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_lending_burst_replays_graphs_on_restored_weights(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
    result: dict[str, Any] = run_engines([lending()], 900.0)[0]
    assert result["status"]["switches_to_fast"] > 0
    assert result["returned_to_full"]
    assert all(rank["residual_intact"] for rank in result["ranks"])
    assert not result["nans"]
