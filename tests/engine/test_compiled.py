"""Under torch.compile a mode is chosen when a step runs: one graph serves both."""

from dataclasses import replace

import pytest

from dps_ray.checks.engine_check import EXACT, mode_specs
from dps_ray.checks.process import run_engines
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_compiled_engine_switches_without_compiling_anew(name: str) -> None:
    """Compiled engines are compared: inductor fuses what surrounds a GEMM it can see into."""
    plain, full, static, _ = (
        replace(spec, compiled=True) for spec in mode_specs(name, make_tiny(name, cache_root()), 1)
    )
    switching = replace(full, scenario="switches", dps={**EXACT, "lend": False})
    expected, forced_fast, result = run_engines([plain, static, switching], 900.0)
    assert result["full"]["tokens"] == expected["tokens"]
    assert result["fast"]["logprobs"] == forced_fast["logprobs"]
    assert result["fast"]["logprobs"] != result["full"]["logprobs"]
    assert result["full again"]["logprobs"] == result["full"]["logprobs"]
    graphs = {run["graphs_compiled"] for run in result.values()}
    assert len(graphs) == 1
    assert graphs.pop() > 0, "nothing was compiled"
