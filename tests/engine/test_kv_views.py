"""KV tensors as views into the shared region."""

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from dps_ray.config import DpsConfigError
from dps_ray.engine.kv_views import layer_views

BLOCKS, TOKENS = 4, 32


@pytest.mark.parametrize(("kernel_tokens", "refused"), [(TOKENS, False), (16, True)])
def test_blocks_that_the_attention_backend_splits_are_refused(
    kernel_tokens: int, refused: bool
) -> None:
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float16)
    page_bytes, stride = spec.page_size_bytes, 4096
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(BLOCKS * stride, ["a"], layer_stride=page_bytes, block_stride=stride)
        ],
        kv_cache_groups=[KVCacheGroupSpec(["a"], spec)],
    )
    buffer = torch.zeros(BLOCKS * stride, dtype=torch.uint8)

    def view() -> dict[str, torch.Tensor]:
        return layer_views(buffer, stride, config, KVCacheLayout.BLHNC, [kernel_tokens])

    if not refused:
        assert view()["a"].shape[0] == BLOCKS
        return
    with pytest.raises(DpsConfigError, match=r"of 32 tokens into ones of 16.*block_size to 16"):
        view()
