"""Features of vLLM that an elastic engine cannot have, each with the way to go on without it."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig

from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.engine.status_page import MAX_RANKS

SPLIT_AT_LOAD = "weights are split when they are loaded, into bytes with a fixed place"
"""Why a running engine cannot take new weights."""
_REPLICAS = "one replica is one engine on one host; start more replicas"
_OFFLOADED = (
    "it would move weights away whose bytes have a fixed place; leave it out: fast mode frees half "
    "of their memory"
)
_DRAFTS = "a draft's tokens would be checked in another mode than they were made for; leave it out"
_CONNECTORS = (
    "a connector would read and fill blocks that are moved or given back under it; leave it out"
)
_TOO_MANY_RANKS = f"at most {MAX_RANKS} ranks share a page"
_CHOSEN = "quantization 'dps' chooses it; leave it out"
_MICROBATCHES = "graphs of microbatches are not kept apart by mode; leave it out"


def _several(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _some(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _given(value: Any) -> bool:
    return value is not None


_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "worker_cls": (lambda value: value not in (None, "auto"), _CHOSEN),
    "scheduler_cls": (_given, _CHOSEN),
    "pipeline_parallel_size": (
        _several,
        "all ranks must hold the same layers; use tensor_parallel_size",
    ),
    "tensor_parallel_size": (
        lambda value: isinstance(value, int) and value > MAX_RANKS,
        _TOO_MANY_RANKS,
    ),
    "data_parallel_size": (_several, _REPLICAS),
    "nnodes": (_several, _REPLICAS),
    "api_server_count": (_several, _REPLICAS),
    "decode_context_parallel_size": (
        _several,
        "KV blocks would lie on some ranks only; leave it out",
    ),
    # On CPUs plain vLLM accepts it too, and its experts then read past the rank's own.
    "enable_expert_parallel": (
        bool,
        "the kernels take every expert of a layer; use tensor_parallel_size",
    ),
    "enable_eplb": (bool, "it moves experts whose bytes have a fixed place; leave it out"),
    "num_gpu_blocks_override": (
        _given,
        "lent blocks come on top; size the KV cache with kv_cache_memory_bytes",
    ),
    "speculative_config": (_given, _DRAFTS),
    "spec_method": (_given, _DRAFTS),
    "spec_model": (_given, _DRAFTS),
    "kv_transfer_config": (_given, _CONNECTORS),
    "kv_offloading_size": (_given, _CONNECTORS),
    "enable_lora": (
        bool,
        "adapters read 16-bit weights that are split here; merge the adapter into the checkpoint "
        "and serve that",
    ),
    "weight_transfer_config": (
        _given,
        f"{SPLIT_AT_LOAD}; start replicas of the new checkpoint",
    ),
    "enable_sleep_mode": (
        bool,
        "it would free memory that is mapped twice; stop the replica instead",
    ),
    "cpu_offload_gb": (_some, _OFFLOADED),
    "offload_group_size": (_some, _OFFLOADED),
}
"""Engine arguments by vLLM's names: the values that are refused, and the way to go on."""
_ON_CUDA: dict[str, tuple[Callable[[Any], bool], str]] = {
    "enable_dbo": (bool, _MICROBATCHES),
    "ubatch_size": (_several, _MICROBATCHES),
    "cudagraph_mm_encoder": (
        bool,
        "graphs of the vision encoder are not kept apart by mode; leave it out",
    ),
}


def refused_arguments(arguments: Mapping[str, Any], *, cuda: bool = False) -> dict[str, str]:
    """What of an engine's arguments no elastic engine can have, each with the way to go on.

    Parameters
    ----------
    arguments
        By vLLM's names, with any values; what is left out is not asked for.
    cuda
        Of an engine on a CUDA device.
    """
    refused = {**_ARGUMENTS, **_ON_CUDA} if cuda else _ARGUMENTS
    return {name: remedy for name, (asks, remedy) in refused.items() if asks(arguments.get(name))}


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse engine arguments before anything is made of them.

    Raises
    ------
    DpsConfigError
        One line with a sentence for each feature: its name and the way to go on.
    """
    _refuse(refused_arguments(arguments))


def refuse_unsupported(config: VllmConfig) -> None:
    """Refuse what no elastic engine can have, whatever its device and wherever it was asked for.

    Raises
    ------
    DpsConfigError
        As ``refuse_arguments`` does.
    """
    parallel, model = config.parallel_config, config.model_config
    offload = config.offload_config
    resolved = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "nnodes": parallel.nnodes,
        "api_server_count": parallel._api_process_count,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "enable_eplb": parallel.enable_eplb,
        "num_gpu_blocks_override": config.cache_config.num_gpu_blocks_override,
        "speculative_config": config.speculative_config,
        "kv_transfer_config": config.kv_transfer_config,
        "enable_lora": config.lora_config is not None,
        "weight_transfer_config": config.weight_transfer_config,
        "enable_sleep_mode": model.enable_sleep_mode,
        "cpu_offload_gb": offload.uva.cpu_offload_gb,
        "offload_group_size": offload.prefetch.offload_group_size,
    }
    kinds = {
        "encoder-decoder model": (
            model.is_encoder_decoder,
            "the blocks of cross-attention are not elastic; serve it without quantization 'dps'",
        ),
        "pooling model": (
            model.runner_type == "pooling",
            "it keeps no KV cache that could grow; serve it without quantization 'dps'",
        ),
        "state-space model": (
            model.is_hybrid or model.is_attention_free,
            "its states are no runs of KV blocks; serve it without quantization 'dps'",
        ),
    }
    _refuse(
        refused_arguments(resolved)
        | {name: remedy for name, (present, remedy) in kinds.items() if present}
    )
    if parallel.world_size > MAX_RANKS:
        raise DpsConfigError(f"tensor_parallel_size is {parallel.world_size}: {_TOO_MANY_RANKS}")


def refuse_on_cuda(config: VllmConfig, options: DpsOptions) -> None:
    """Refuse what would run a layer in another mode than the step's, or outside the kernels.

    Raises
    ------
    DpsConfigError
        As ``refuse_arguments`` does.
    """
    resolved = {
        "enable_dbo": config.parallel_config.enable_dbo,
        "ubatch_size": config.parallel_config.ubatch_size,
        "cudagraph_mm_encoder": config.compilation_config.cudagraph_mm_encoder,
    }
    _refuse(refused_arguments(resolved, cuda=True))
    if captures_graphs(config):
        graphs = config.compilation_config.cudagraph_mode
        faults = graph_faults(options, f"cudagraph_mode is {graphs.name}")
        if faults:
            raise DpsConfigError(*faults)


def graph_faults(options: DpsOptions, graphs: str) -> list[str]:
    """Options that CUDA graphs cannot obey.

    Parameters
    ----------
    options
        Those of an engine that captures graphs.
    graphs
        What says that it does, for the message.
    """
    faults = []
    if options.kernel == "exact":
        faults.append(
            "additional_config.dps.kernel is 'exact': it rebuilds 16-bit weights outside of the "
            "kernels, which a CUDA graph cannot hold; use kernel 'auto', or set enforce_eager"
        )
    if options.return_by == "layer":
        # A captured graph is full or fast in all its layers: GRAPHS.md.
        faults.append(
            f"additional_config.dps.return_by is 'layer' and {graphs}: a CUDA graph runs all "
            "layers in one mode; use return_by 'all', or give up graphs with enforce_eager"
        )
    return faults


def captures_graphs(config: VllmConfig) -> bool:
    """Whether the engine's forward passes are captured as CUDA graphs."""
    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def _refuse(refused: Mapping[str, str]) -> None:
    if refused:
        sentences = ". ".join(f"{name}: {remedy}" for name, remedy in refused.items())
        raise DpsConfigError(f"not with quantization 'dps': {sentences}")
