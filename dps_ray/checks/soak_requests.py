"""Requests of the soak: prompts that share prefixes, and what their cached blocks contain."""

from dataclasses import dataclass

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

TOPICS, LONGEST_PREFIX = 3, 6
"""Prompts of a topic begin alike, so that they share cached blocks."""
BLOCK_TOKENS = 2


@dataclass
class SoakRequest:
    """Blocks of one request: a prefix that is shared and never rewritten, then its own."""

    blocks: list[KVCacheBlock]
    prefix: int
    scheduled: bool = False
    """Part of a step that was planned; only then can it finish."""


init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)


def prefix_of(topic: int) -> Request:
    """The prompt that all requests of a topic begin with, as vLLM hashes it."""
    tokens = [topic] * (LONGEST_PREFIX * BLOCK_TOKENS)
    return Request(f"topic-{topic}", tokens, SamplingParams(), None, block_hasher=_hasher)


def tag_of(block_hash: bytes) -> int:
    """Content of a cached block; the top bit keeps it apart from all counted tags."""
    return int.from_bytes(block_hash[:8], "little") | 1 << 63
