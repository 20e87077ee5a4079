"""Turns a vLLM configuration that asks for ``--quantization dps`` into an elastic one.

This runs once, in the process that creates the engine, before anything is spawned: every
combination that cannot work is refused here, in one line.
"""

import functools
import hashlib
import json
import uuid
from collections import UserDict
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dps_ray.config import DpsConfigError, DpsOptions, parse_options, refuse_stray_keys
from dps_ray.engine.page_owner import remove_orphans_at_exit
from dps_ray.engine.preflight import preflight
from dps_ray.engine.refusals import refuse_arguments, refuse_on_cuda, refuse_unsupported
from dps_ray.memory.drivers import DriverKind

WORKER_CLASSES = {
    "host": "dps_ray.engine.worker.DpsCpuWorker",
    "cuda": "dps_ray.engine.gpu_worker.DpsGpuWorker",
}
SCHEDULER_CLASSES = {
    False: "dps_ray.engine.scheduler.DpsScheduler",
    True: "dps_ray.engine.scheduler.DpsAsyncScheduler",
}


class AdditionalConfig(UserDict[str, Any]):
    """``additional_config`` of a configured engine.

    vLLM hashes it into the key of its compile cache; the engine's own key must not change that, or
    every start would compile anew.
    """

    def compute_hash(self) -> str:
        """Hash of everything but the engine's key."""
        content = {**self.data, "dps": {**self.data["dps"], "key": None}}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hook_engine_args() -> None:
    """Configure every engine that asks for ``dps``, whoever creates it (CLI, Ray, LLM class)."""
    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if self.quantization != "dps":
            return create(self, *args, **kwargs)
        refuse_stray_keys(self.additional_config)
        options = parse_options(self.additional_config)
        refuse_arguments(vars(self))
        _check_model(self, options)
        from dps_ray.engine.admission import hook_front

        hook_front()
        config = create(self, *args, **kwargs)
        if _picks_amx_latents(config):
            # Those kernels flatten a layer's cache, which a block-outermost layout cannot offer.
            self.attention_backend = AttentionBackendEnum.CPU_MLA
            config = create(self, *args, **kwargs)
        return configure(config, options)

    EngineArgs.create_engine_config = create_engine_config


def configure(config: VllmConfig, options: DpsOptions) -> VllmConfig:
    """Refuse what cannot work, choose worker and scheduler, and name the status page."""
    refuse_unsupported(config)
    remove_orphans_at_exit()
    kind = driver_kind(options)
    if kind == "cuda":
        refuse_on_cuda(config, options)
    resolved = options.model_copy(update={"key": uuid.uuid4().hex[:16]}).model_dump(mode="json")
    config.additional_config = AdditionalConfig({**config.additional_config, "dps": resolved})
    config.parallel_config.worker_cls = WORKER_CLASSES[kind]
    asynchronous = bool(config.scheduler_config.async_scheduling)
    config.scheduler_config.scheduler_cls = SCHEDULER_CLASSES[asynchronous]
    return config


def engine_options(config: VllmConfig) -> DpsOptions:
    """The resolved options of a configured engine, its key included."""
    options = parse_options(config.additional_config)
    if options.key is None:
        raise DpsConfigError(
            "additional_config.dps.key is missing: create the configuration through "
            "vllm.EngineArgs with quantization 'dps' in a process that loads vLLM's plugins"
        )
    return options


def driver_kind(options: DpsOptions) -> DriverKind:
    """The memory driver of this platform.

    Raises
    ------
    DpsConfigError
        When there is none, or another one was asked for.
    """
    device = current_platform.device_type
    kind: DriverKind | None = {"cpu": "host", "cuda": "cuda"}.get(device)  # type: ignore[assignment]
    if current_platform.is_rocm() or kind is None or options.driver not in ("auto", kind):
        raise DpsConfigError(
            f"additional_config.dps.driver is {options.driver!r} on {current_platform.device_name}:"
            " there are drivers for CPUs ('host') and NVIDIA GPUs ('cuda'); use 'auto' on one of "
            "these"
        )
    return kind


def _picks_amx_latents(config: VllmConfig) -> bool:
    return bool(
        current_platform.is_cpu()
        and config.model_config.use_mla
        and config.attention_config.backend is None
        and torch.cpu._is_amx_tile_supported()
    )


def _check_model(args: EngineArgs, options: DpsOptions) -> None:
    """Look into the model folder, unless what it says is not what will be served."""
    if args.hf_overrides or args.load_format == "dummy":
        return
    preflight(
        args.model,
        options=options,
        dtype=str(args.dtype),
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        kv_cache_dtype=args.kv_cache_dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        block_size=args.block_size,
        kind=driver_kind(options),
    )
