"""vLLM's per-layer KV tensors as views into the shared region."""

from dataclasses import replace

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import _get_kv_cache_bytes_per_block, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def bytes_per_block(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> int:
    """Bytes of one KV block over all layers of this rank, padding between blocks not counted."""
    return _get_kv_cache_bytes_per_block(get_kv_cache_groups(config, specs))


def layer_views(
    buffer: torch.Tensor,
    block_stride_bytes: int,
    config: KVCacheConfig,
    layout: KVCacheLayout,
    kernel_block_sizes: list[int],
) -> dict[str, torch.Tensor]:
    """One KV tensor a layer, all of them views into ``buffer``.

    Parameters
    ----------
    buffer
        ``[num_blocks * block_stride_bytes]`` uint8.
    block_stride_bytes
        Distance of two blocks; at least the bytes of one.
    layout
        Block-outermost, so that a run of bytes is a run of blocks for every layer.
    """
    views: dict[str, torch.Tensor] = {}
    raw = buffer.view(torch.int8)
    for tensor in config.kv_cache_tensors:
        index, group = next(
            (index, group)
            for index, group in enumerate(config.kv_cache_groups)
            if tensor.layers[0] in group.layer_names
        )
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[tensor.layers[0]]
        layers = create_kv_cache_views(
            raw,
            spec,
            config.num_blocks,
            layout,
            replace(tensor, block_stride=block_stride_bytes),
            kernel_block_size=kernel_block_sizes[index],
        )
        views.update(zip(tensor.layers, layers, strict=True))
    return views
