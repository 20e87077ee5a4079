"""Features of vLLM that an elastic engine cannot have, each with the way to go on without it."""

from vllm.config import CUDAGraphMode, VllmConfig

from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.engine.status_page import MAX_RANKS

_REPLICAS = "one replica is one engine on one host; start more replicas"
_OFFLOADED = (
    "it would move weights away whose bytes have a fixed place; leave it out: fast mode frees half "
    "of their memory"
)


def refuse_unsupported(config: VllmConfig) -> None:
    """Refuse what no elastic engine can have, whatever its device.

    Raises
    ------
    DpsConfigError
        One line with a sentence for each feature: its name and the way to go on.
    """
    parallel, model = config.parallel_config, config.model_config
    offload = config.offload_config
    _refuse(
        {
            "pipeline_parallel_size": (
                parallel.pipeline_parallel_size > 1,
                "all ranks must hold the same layers; use tensor_parallel_size",
            ),
            "data_parallel_size": (parallel.data_parallel_size > 1, _REPLICAS),
            "nnodes": (parallel.nnodes > 1, _REPLICAS),
            "api_server_count": (parallel._api_process_count > 1, _REPLICAS),
            "decode_context_parallel_size": (
                parallel.decode_context_parallel_size > 1,
                "KV blocks would lie on some ranks only; leave it out",
            ),
            "enable_eplb": (
                parallel.enable_eplb,
                "it moves experts whose bytes have a fixed place; leave it out",
            ),
            "num_gpu_blocks_override": (
                config.cache_config.num_gpu_blocks_override is not None,
                "lent blocks come on top; size the KV cache with kv_cache_memory_bytes",
            ),
            "speculative_config": (
                config.speculative_config is not None,
                "a draft's tokens would be checked in another mode than they were made for; leave "
                "it out",
            ),
            "kv_transfer_config": (
                config.kv_transfer_config is not None,
                "a connector would read and fill blocks that are moved or given back under it; "
                "leave it out",
            ),
            "lora_config": (
                config.lora_config is not None,
                "adapters read 16-bit weights that are split here; merge the adapter into the "
                "checkpoint and serve that",
            ),
            "enable_sleep_mode": (
                model.enable_sleep_mode,
                "it would free memory that is mapped twice; stop the replica instead",
            ),
            "cpu_offload_gb": (offload.uva.cpu_offload_gb > 0, _OFFLOADED),
            "offload_group_size": (offload.prefetch.offload_group_size > 0, _OFFLOADED),
            "encoder-decoder model": (
                model.is_encoder_decoder,
                "the blocks of cross-attention are not elastic; serve it without quantization "
                "'dps'",
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
    )
    if parallel.world_size > MAX_RANKS:
        raise DpsConfigError(
            f"tensor_parallel_size is {parallel.world_size}: at most {MAX_RANKS} ranks share a page"
        )


def refuse_on_cuda(config: VllmConfig, options: DpsOptions) -> None:
    """Refuse what would run a layer in another mode than the step's, or outside the kernels.

    Raises
    ------
    DpsConfigError
        As ``refuse_unsupported`` does.
    """
    _refuse(
        {
            "enable_dbo": (
                config.parallel_config.use_ubatching,
                "graphs of microbatches are not kept apart by mode; leave it out",
            ),
            "cudagraph_mm_encoder": (
                config.compilation_config.cudagraph_mm_encoder,
                "graphs of the vision encoder are not kept apart by mode; leave it out",
            ),
            "enable_expert_parallel": (
                config.parallel_config.enable_expert_parallel,
                "the kernels take every expert of a layer; use tensor_parallel_size",
            ),
        }
    )
    if options.kernel == "exact" and captures_graphs(config):
        raise DpsConfigError(
            "additional_config.dps.kernel is 'exact': it rebuilds 16-bit weights outside of the "
            "kernels, which a CUDA graph cannot hold; use kernel 'auto', or set enforce_eager"
        )
    if options.return_by == "layer" and captures_graphs(config):
        # A captured graph is full or fast in all its layers: GRAPHS.md.
        graphs = config.compilation_config.cudagraph_mode
        raise DpsConfigError(
            f"additional_config.dps.return_by is 'layer' and cudagraph_mode is {graphs.name}: a "
            "CUDA graph runs all layers in one mode; use return_by 'all', or give up graphs with "
            "enforce_eager"
        )


def captures_graphs(config: VllmConfig) -> bool:
    """Whether the engine's forward passes are captured as CUDA graphs."""
    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def _refuse(features: dict[str, tuple[bool, str]]) -> None:
    refused = [f"{name}: {remedy}" for name, (present, remedy) in features.items() if present]
    if refused:
        raise DpsConfigError(f"not with quantization 'dps': {'. '.join(refused)}")
