"""Under torch.compile a mode is chosen when a step runs: one graph serves both."""

from dataclasses import replace
from typing import Any

import pytest

from dps_ray.checks.fused_check import FUSED_BOUND, fused_distances, fused_spec
from dps_ray.checks.layer_check import layer_spec
from dps_ray.checks.mode_check import mode_specs, static_fast_spec
from dps_ray.checks.process import run_engines
from dps_ray.checks.specs import EngineSpec
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def specs(name: str) -> tuple[EngineSpec, EngineSpec, EngineSpec]:
    """Plain, forced fast and switching engines; no prefix outlives a switch."""
    plain, switching, _ = (
        replace(spec, compiled=True) for spec in mode_specs(name, make_tiny(name, cache_root()), 1)
    )
    return plain, static_fast_spec(name, plain), switching


def assert_no_graph_was_added(runs: dict[str, Any]) -> None:
    graphs = {run["graphs_compiled"] for run in runs.values()}
    assert len(graphs) == 1
    assert graphs.pop() > 0, "nothing was compiled"


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def traced(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What plain, forced fast, switching and layer by layer engines computed, by these names."""
    plain, fast, switching = specs(request.param)
    layers = replace(
        layer_spec(make_tiny(request.param, cache_root())),
        compiled=True,
        scenario="layers",
        arguments={"chosen": [[], [0], [0, 1, 2], [0, 1, 2, 3], []]},
    )
    with pytest.MonkeyPatch.context() as patch:
        # vLLM then runs what Dynamo traced as it is, without a compiler behind it.
        patch.setenv("VLLM_CPU_CI_ENV", "1")
        results = run_engines([plain, fast, switching, layers])
    return dict(zip(("plain", "fast", "switching", "layers"), results, strict=True))


def test_traced_engine_switches_without_tracing_anew(traced: dict[str, dict[str, Any]]) -> None:
    plain, fast, switching = traced["plain"], traced["fast"], traced["switching"]
    assert switching["full"]["tokens"] == plain["tokens"]
    assert switching["full"]["logprobs"] == plain["logprobs"]
    assert switching["fast"]["logprobs"] == fast["logprobs"] != plain["logprobs"]
    assert switching["full again"]["logprobs"] == plain["logprobs"]
    assert_no_graph_was_added(switching)


def test_traced_engine_changes_its_full_layers_without_tracing_anew(
    traced: dict[str, dict[str, Any]],
) -> None:
    names = ("none", "one", "three", "all", "none again")
    runs = dict(zip(names, traced["layers"]["runs"], strict=True))
    assert runs["all"]["logprobs"] == traced["plain"]["logprobs"]
    assert runs["none"]["logprobs"] == runs["none again"]["logprobs"] == traced["fast"]["logprobs"]
    assert len({str(run["logprobs"]) for run in runs.values()}) == 4
    assert_no_graph_was_added(runs)


@pytest.fixture(scope="module")
def fused() -> dict[str, dict[str, Any]]:
    """The default kernel, traced and eager, beside plain and exact engines."""
    plain, fast, switching = specs("qwen3")
    traced = fused_spec(switching)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_CI_ENV", "1")
        results = run_engines([plain, fast, traced, replace(traced, compiled=False)])
    return dict(zip(("plain", "fast", "traced", "eager"), results, strict=True))


@pytest.mark.parametrize("how", ["traced", "eager"])
def test_default_kernel_stays_near_the_exact_one_in_both_modes(
    fused: dict[str, dict[str, Any]], how: str
) -> None:
    runs = fused[how]
    distances = fused_distances(runs, fused["plain"], fused["fast"])
    assert max(distances.values()) <= FUSED_BOUND
    assert runs["full again"]["logprobs"] == runs["full"]["logprobs"] != runs["fast"]["logprobs"]


def test_default_kernel_switches_without_tracing_anew(fused: dict[str, dict[str, Any]]) -> None:
    assert_no_graph_was_added(fused["traced"])


def test_compiled_engine_switches_without_compiling_anew() -> None:
    """Tokens only: inductor fuses what surrounds a GEMM that it can see into."""
    plain, _, switching = specs("qwen3-moe")
    expected, result = run_engines([plain, switching], 800.0)
    assert result["full"]["tokens"] == expected["tokens"]
    assert result["fast"]["logprobs"] != result["full"]["logprobs"]
    assert result["full again"]["logprobs"] == result["full"]["logprobs"]
    assert_no_graph_was_added(result)
