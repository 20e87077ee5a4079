"""Under torch.compile a mode is chosen when a step runs: one graph serves both."""

from dataclasses import replace
from typing import Any

import pytest

from dps_ray.checks.engine_check import EXACT, mode_specs
from dps_ray.checks.layer_check import layer_spec
from dps_ray.checks.process import run_engines
from dps_ray.checks.specs import EngineSpec
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def specs(name: str) -> tuple[EngineSpec, EngineSpec, EngineSpec]:
    """Plain, forced fast and switching engines; no prefix outlives a switch."""
    plain, full, fast, _ = (
        replace(spec, compiled=True, enable_prefix_caching=False)
        for spec in mode_specs(name, make_tiny(name, cache_root()), 1)
    )
    return plain, fast, replace(full, scenario="switches", dps={**EXACT, "lend": False})


def assert_no_graph_was_added(runs: dict[str, Any]) -> None:
    graphs = {run["graphs_compiled"] for run in runs.values()}
    assert len(graphs) == 1
    assert graphs.pop() > 0, "nothing was compiled"


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_traced_engine_switches_without_tracing_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM then runs what Dynamo traced as it is, without a compiler behind it.
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    plain, fast, switching = run_engines(specs(name))
    assert switching["full"]["tokens"] == plain["tokens"]
    assert switching["full"]["logprobs"] == plain["logprobs"]
    assert switching["fast"]["logprobs"] == fast["logprobs"] != plain["logprobs"]
    assert switching["full again"]["logprobs"] == plain["logprobs"]
    assert_no_graph_was_added(switching)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_traced_engine_changes_its_full_layers_without_tracing_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    plain, fast, _ = specs(name)
    spec = replace(
        layer_spec(make_tiny(name, cache_root())),
        compiled=True,
        scenario="layers",
        arguments={"chosen": [[], [0], [0, 1, 2], [0, 1, 2, 3], []]},
    )
    expected, all_fast, result = run_engines([plain, fast, spec])
    runs = dict(zip(("none", "one", "three", "all", "none again"), result["runs"], strict=True))
    assert runs["all"]["logprobs"] == expected["logprobs"]
    assert runs["none"]["logprobs"] == runs["none again"]["logprobs"] == all_fast["logprobs"]
    assert len({str(run["logprobs"]) for run in runs.values()}) == 4
    assert_no_graph_was_added(runs)


def test_compiled_engine_switches_without_compiling_anew() -> None:
    """Tokens only: inductor fuses what surrounds a GEMM that it can see into."""
    plain, _, switching = specs("qwen3-moe")
    expected, result = run_engines([plain, switching], 800.0)
    assert result["full"]["tokens"] == expected["tokens"]
    assert result["fast"]["logprobs"] != result["full"]["logprobs"]
    assert result["full again"]["logprobs"] == result["full"]["logprobs"]
    assert_no_graph_was_added(result)
