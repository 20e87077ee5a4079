"""Latent-attention KV writes that honour the tensor's strides (CPU).

vLLM's CPU backend flattens a layer's latent cache to write it, which a block-outermost layout
cannot offer: there the blocks of one layer do not touch. Its decode kernel reads by block stride.
"""

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl


def write_latents(
    self: CPUMLAImpl,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
) -> None:
    """Write the step's latents ``[tokens, rank]`` and rotary keys ``[tokens, 1, rope]``.

    ``kv_cache`` is ``[blocks, block_size, rank + rope]`` with any strides; slots below 0 are
    padding.
    """
    if kv_cache.numel() == 0:
        return
    slots = slot_mapping.flatten().to(torch.long)
    valid = slots >= 0
    latents = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1)[valid].to(kv_cache.dtype)
    size = kv_cache.shape[1]
    kv_cache[slots[valid] // size, slots[valid] % size] = latents


def honour_strides() -> None:
    """Install ``write_latents``; it gives the stock bits for the stock layout too."""
    CPUMLAImpl.do_kv_cache_update = write_latents
