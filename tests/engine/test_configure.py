"""What an elastic engine refuses, before anything is spawned."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from dps_ray.config import DpsConfigError, DpsOptions, parse_options
from dps_ray.engine.configure import SCHEDULER_CLASSES, WORKER_CLASS, engine_options
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


def test_quantization_alone_chooses_worker_scheduler_and_page(tiny: Any) -> None:
    config = engine_args(tiny("qwen3")).create_engine_config()
    assert config.parallel_config.worker_cls == WORKER_CLASS
    assert config.scheduler_config.scheduler_cls in SCHEDULER_CLASSES.values()
    options = engine_options(config)
    assert options.key is not None
    assert options == DpsOptions(key=options.key)
    page = StatusPage.attach(options.key)
    assert page.read() is None
    page.remove()


def test_engine_without_dps_is_left_alone(tiny: Any) -> None:
    config = engine_args(tiny("qwen3"), quantization=None).create_engine_config()
    assert config.parallel_config.worker_cls != WORKER_CLASS
    assert config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: not supported together with"),
        ({"num_gpu_blocks_override": 64}, "num_gpu_blocks_override: not supported together with"),
        ({"enable_lora": True}, "lora_config: not supported together with"),
        ({"worker_cls": "other.Worker"}, "worker_cls .'other.Worker'. and scheduler_cls .None."),
        (
            {"additional_config": {"dps": {"driver": "cuda"}}},
            "additional_config.dps.driver is 'cuda' on cpu",
        ),
        (
            {"additional_config": {"dps": {"low_watermark": 1.5}}},
            "additional_config.dps.low_watermark is 1.5: Input should be less than or equal to 1",
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
