"""No engine of ``tests/gpu`` is dead on arrival: each passes the checks of a front process."""

import pytest
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from dps_ray.checks.engine import llm_arguments
from dps_ray.checks.specs import EngineSpec
from dps_ray.config import DpsConfigError, parse_options
from dps_ray.engine.configure import WORKER_CLASSES, configure
from dps_ray.engine.preflight import preflight
from tests.gpu.engines import every_engine, lending, switching


def start(spec: EngineSpec) -> str:
    """Configure an engine as on a machine with a GPU, and give its worker's class."""
    load_general_plugins()
    arguments = llm_arguments(spec)
    # vLLM's choice for a GPU, which this platform would not make.
    graphs = CUDAGraphMode.FULL_AND_PIECEWISE if spec.compiled else CUDAGraphMode.NONE
    config = EngineArgs(**arguments).create_engine_config()
    config.compilation_config.cudagraph_mode = graphs
    return configure(config, parse_options({"dps": spec.dps})).parallel_config.worker_cls


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("spec", every_engine(), ids=lambda spec: spec.label)
def test_engine_of_the_gpu_tests_is_not_refused_on_a_gpu(spec: EngineSpec) -> None:
    assert start(spec) == WORKER_CLASSES["cuda"]


@pytest.mark.usefixtures("on_cuda")
def test_an_engine_that_no_gpu_would_start_is_noticed_here() -> None:
    spec = switching("qwen3", "eager")
    assert spec.dps is not None
    spec.dps["kernel"] = "exact"
    with pytest.raises(DpsConfigError, match="kernel is 'exact'"):
        start(spec)


def test_burst_of_the_gpu_tests_needs_more_blocks_than_a_gpu_has_in_full_mode() -> None:
    spec = lending()
    planned = preflight(
        spec.model,
        options=parse_options({"dps": spec.dps}),
        kv_cache_memory_bytes=spec.kv_bytes,
        block_size=spec.block_size,
        kind="cuda",
    )
    assert planned is not None
    assert planned.geometry is not None
    tokens = spec.arguments["prompt_tokens"] + spec.arguments["max_tokens"]
    needed = spec.arguments["count"] * -(-tokens // spec.block_size)
    assert planned.geometry.base_blocks < needed < planned.geometry.num_blocks
    assert spec.arguments["count"] <= spec.max_num_seqs
    assert spec.max_model_len <= planned.geometry.base_blocks * spec.block_size
