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
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dps_ray.config import DpsConfigError, DpsOptions, parse_options
from dps_ray.engine.preflight import preflight
from dps_ray.engine.status_page import MAX_RANKS
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
        options = parse_options(self.additional_config)
        if self.worker_cls != "auto" or self.scheduler_cls is not None:
            raise DpsConfigError(
                f"worker_cls ({self.worker_cls!r}) and scheduler_cls ({self.scheduler_cls!r}) are "
                "chosen by quantization 'dps': leave both out"
            )
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
    _refuse_unsupported(config)
    kind = driver_kind(options)
    if kind == "cuda":
        _refuse_on_cuda(config, options)
        _refuse_graphs_of_returning_layers(config, options)
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


def _refuse_unsupported(config: VllmConfig) -> None:
    parallel, cache = config.parallel_config, config.cache_config
    unsupported = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "data_parallel_size": parallel.data_parallel_size > 1,
        "nnodes": parallel.nnodes > 1,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "enable_eplb": parallel.enable_eplb,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override is not None,
        "speculative_config": config.speculative_config is not None,
        "kv_transfer_config": config.kv_transfer_config is not None,
        "lora_config": config.lora_config is not None,
        "enable_sleep_mode": config.model_config.enable_sleep_mode,
    }
    _refuse(unsupported)
    if parallel.world_size > MAX_RANKS:
        raise DpsConfigError(
            f"tensor_parallel_size is {parallel.world_size}: at most {MAX_RANKS} ranks share a page"
        )


def captures_graphs(config: VllmConfig) -> bool:
    """Whether the engine's forward passes are captured as CUDA graphs."""
    mode = config.compilation_config.cudagraph_mode
    return not config.model_config.enforce_eager and mode not in (None, CUDAGraphMode.NONE)


def _refuse_on_cuda(config: VllmConfig, options: DpsOptions) -> None:
    """Refuse what would run a layer in another mode than the step's, or outside the kernels."""
    _refuse(
        {
            # Graphs of microbatches and of the vision encoder are not kept apart by mode.
            "enable_dbo": config.parallel_config.use_ubatching,
            "cudagraph_mm_encoder": config.compilation_config.cudagraph_mm_encoder,
            "enable_expert_parallel": config.parallel_config.enable_expert_parallel,
        }
    )
    if options.kernel == "exact" and captures_graphs(config):
        raise DpsConfigError(
            "additional_config.dps.kernel is 'exact': it rebuilds 16-bit weights outside of the "
            "kernels, which a CUDA graph cannot hold; use kernel 'auto', or set enforce_eager"
        )


def _refuse_graphs_of_returning_layers(config: VllmConfig, options: DpsOptions) -> None:
    """A captured graph is full or fast in all its layers: ``GRAPHS.md``."""
    graphs = config.compilation_config.cudagraph_mode
    if options.return_by == "layer" and graphs is not CUDAGraphMode.NONE:
        raise DpsConfigError(
            f"additional_config.dps.return_by is 'layer' and cudagraph_mode is {graphs.name}: a "
            "CUDA graph runs all layers in one mode; use return_by 'all', or give up graphs with "
            "enforce_eager"
        )


def _refuse(unsupported: dict[str, bool]) -> None:
    refused = [name for name, present in unsupported.items() if present]
    if refused:
        raise DpsConfigError(
            f"{', '.join(refused)}: not supported together with quantization 'dps' yet; leave "
            f"{'it' if len(refused) == 1 else 'them'} out (size the KV cache with "
            "kv_cache_memory_bytes, scale out with replicas)"
        )
