"""Real CUDA graphs, one set a mode, on vLLM's V1 and V2 runners.

What the engine does around a capture is tested without a GPU in ``tests/engine/test_mode_graphs``;
here real graphs are captured and replayed, and must give what the same engine gives without them.
"""

from dataclasses import replace
from typing import Any

import pytest

from dps_ray.checks.process import run_engines
from dps_ray.checks.specs import EngineSpec
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

RUNNERS = {"V1": "0", "V2": "1"}


def switching(name: str, graphs: str, *, compiled: bool) -> EngineSpec:
    return EngineSpec(
        label=f"{name}, graphs {graphs}",
        model=str(make_tiny(name, cache_root())),
        kv_bytes=256 << 20,
        max_model_len=512,
        block_size=16,
        enable_prefix_caching=False,
        compiled=compiled,
        dps={"kernel": "exact", "lend": False, "graphs": graphs},
        scenario="switches",
    )


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("graphs", ["eager", "lazy"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_graphs_of_a_mode_compute_in_that_mode(
    runner: str, graphs: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
    captured = switching(name, graphs, compiled=True)
    with_graphs, without = run_engines([captured, replace(captured, compiled=False)], 900.0)
    for mode in ("full", "fast", "full again"):
        assert with_graphs[mode]["tokens"] == without[mode]["tokens"]
        assert with_graphs[mode]["nans"] == 0
    assert with_graphs["full"]["logprobs"] != with_graphs["fast"]["logprobs"]
    assert with_graphs["full"]["logprobs"] == with_graphs["full again"]["logprobs"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_lending_burst_replays_graphs_on_restored_weights(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
    spec = replace(
        switching("qwen3", "eager", compiled=True),
        kv_bytes=8 << 20,
        dps={"kernel": "exact", "min_fast_dwell_s": 0.0},
        scenario="burst",
        arguments={"count": 12, "prompt_tokens": 96, "max_tokens": 96},
    )
    result: dict[str, Any] = run_engines([spec], 900.0)[0]
    assert result["status"]["switches_to_fast"] > 0
    assert result["returned_to_full"]
    assert all(rank["residual_intact"] for rank in result["ranks"])
    assert not result["nans"]
