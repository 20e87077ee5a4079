"""vLLM's per-layer KV tensors as views into the shared region."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from vllm.v1.worker.utils import bind_kv_cache

from dps_ray.config import DpsConfigError
from dps_ray.engine import rank as ranks
from dps_ray.memory.geometry import Geometry

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner
else:
    # The mixin stands before a runner in the method resolution order.
    _Runner = object


class RegionKvCache(_Runner):
    """Mixin over vLLM's V1 model runners: the KV cache lies in the shared region."""

    dps_geometry: Geometry | None = None
    """Set by the worker once the residual's size is known; while memory is being profiled there
    is none, and vLLM allocates the few blocks it needs for that."""

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        if self.dps_geometry is None:
            return super().initialize_kv_cache_tensors(
                kv_cache_config, kernel_block_sizes, *args, **kwargs
            )
        views = region_views(
            self.dps_geometry,
            kv_cache_config,
            self.cache_config.get_resolved_kv_cache_layout(),
            kernel_block_sizes,
            self.shared_kv_cache_layers,
        )
        bind_kv_cache(views, self.compilation_config.static_forward_context, self.kv_caches, 1)
        return views


def region_views(
    geometry: Geometry,
    config: KVCacheConfig,
    layout: KVCacheLayout,
    kernel_block_sizes: list[int],
    shared_layers: dict[str, str],
) -> dict[str, torch.Tensor]:
    """Build this rank's shared region and view it as one KV tensor a layer.

    Parameters
    ----------
    shared_layers
        Layers that read another layer's cache, and whose.

    Raises
    ------
    DpsConfigError
        When vLLM counts other blocks than the region holds.
    """
    if config.num_blocks != geometry.num_blocks:
        raise DpsConfigError(
            f"vLLM planned {config.num_blocks} KV blocks, rank memory holds "
            f"{geometry.num_blocks}: size the KV cache with kv_cache_memory_bytes only"
        )
    if torch.accelerator.is_available():
        # Torch may still hold what the 16-bit weights took: units come straight from the driver.
        torch.accelerator.empty_cache()
    buffer = ranks.current().build_region(geometry)
    views = layer_views(buffer, geometry.block_stride_bytes, config, layout, kernel_block_sizes)
    return views | {layer: views[target] for layer, target in shared_layers.items()}


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
    kernel_block_sizes
        Tokens of a block as the attention backend of each group counts them.

    Raises
    ------
    DpsConfigError
        When the backend counts other blocks than the scheduler: its tables would name parts of
        blocks, which a move does not know.
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
        if kernel_block_sizes[index] != spec.block_size:
            raise DpsConfigError(
                f"the attention backend splits KV blocks of {spec.block_size} tokens into ones of "
                f"{kernel_block_sizes[index]}, which cannot be moved: set block_size to "
                f"{kernel_block_sizes[index]}"
            )
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
