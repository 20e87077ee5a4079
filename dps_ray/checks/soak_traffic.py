"""Traffic of the soak: requests that come, grow and end, as vLLM's KV cache manager has them."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from dps_ray.checks.soak_content import BlockContents
from dps_ray.checks.soak_point import SoakError
from dps_ray.checks.soak_requests import BLOCK_TOKENS, TOPICS, SoakRequest, prefix_of, tag_of
from dps_ray.engine.block_pool import ElasticBlockPool

MAX_TRANSFERS = 2


class SoakTraffic:
    """Live requests, and blocks that something else holds; each other method is one operation.

    Parameters
    ----------
    pool
        Where blocks come from.
    contents
        Told of every block that is given out, written or freed.
    base_blocks
        Those that exist without lending.
    counts
        Of what happened, by name; added to.
    """

    def __init__(
        self,
        pool: ElasticBlockPool,
        contents: BlockContents,
        base_blocks: int,
        counts: Counter[str],
    ) -> None:
        self._pool = pool
        self._contents = contents
        self._base_blocks = base_blocks
        self._counts = counts
        self._prefixes = [prefix_of(topic) for topic in range(TOPICS)]
        self.requests: list[SoakRequest] = []
        self.transfers: list[KVCacheBlock] = []
        """Blocks that something else than a request holds by id: they must not move."""

    def serve(self, topic: int, length: int, room: int) -> None:
        """Admit a prompt of ``length`` cacheable blocks, reusing what is cached, plus ``room``."""
        request = self._prefixes[topic]
        hashes = request.block_hashes[:length]
        hits: list[KVCacheBlock] = []
        for block_hash in hashes:
            found = self._pool.get_cached_block(block_hash, [0])
            if not found:
                break
            self._contents.must_hold(found[0].block_id, tag_of(block_hash))
            hits += found
        wanted = length - len(hits) + room
        reserved = sum(block.ref_cnt == 0 for block in hits)
        if not length + room or wanted + reserved > self._pool.get_num_free_blocks():
            return
        self._pool.touch(hits)
        blocks = hits + self._take(wanted)
        for block, block_hash in zip(blocks[len(hits) :], hashes[len(hits) :], strict=False):
            self._contents.cached(block.block_id, tag_of(block_hash))
        self._pool.cache_full_blocks(request, blocks, len(hits), length, BLOCK_TOKENS, 0)
        self.requests.append(SoakRequest(blocks, length))
        self._counts["prefix blocks hit"] += len(hits)

    def grow(self, pick: int) -> None:
        """Give a running request one more block."""
        if self.requests and self._pool.get_num_free_blocks():
            self.requests[pick % len(self.requests)].blocks += self._take(1)

    def burst(self, spare: int) -> None:
        """Take all blocks but ``spare``, lending whatever can be lent."""
        wanted = self._pool.get_num_free_blocks() - spare
        if wanted > 0:
            self.requests.append(SoakRequest(self._take(wanted), 0))

    def finish(self, pick: int) -> None:
        """End a request whose step may still be running."""
        if self.requests and self.requests[index := pick % len(self.requests)].scheduled:
            self._free(self.requests.pop(index))

    def finish_all(self) -> None:
        """End every request that has run."""
        for request in [request for request in self.requests if request.scheduled]:
            self.requests.remove(request)
            self._free(request)

    def transfer(self, pick: int) -> None:
        """Something outside begins to read a live block of a lent unit; beyond a few, one ends."""
        if len(self.transfers) == MAX_TRANSFERS:
            self._pool.free_blocks([self.transfers.pop(pick % MAX_TRANSFERS)])
        lent = [
            block
            for request in self.requests
            for block in request.blocks
            if block.block_id >= self._base_blocks
        ]
        if lent:
            block = lent[pick % len(lent)]
            self._pool.touch([block])
            self.transfers.append(block)
        elif self.transfers:
            self._pool.free_blocks([self.transfers.pop()])

    def forward_pass(self) -> NDArray[np.intp]:
        """Blocks written: those given out since the last step, and the one each request is at."""
        for request in self.requests:
            request.scheduled = True
            if len(request.blocks) > request.prefix:
                self._contents.rewritten([request.blocks[-1].block_id])
        return self._contents.write()

    def check_transfers(self) -> None:
        """Assert that every block under a transfer is where it was."""
        for block in self.transfers:
            if block.ref_cnt < 1:
                raise SoakError(f"block {block.block_id} was moved under a transfer")

    def _take(self, number: int) -> list[KVCacheBlock]:
        blocks = self._pool.get_new_blocks(number)
        ids = {block.block_id for block in blocks}
        held = {block.block_id for request in self.requests for block in request.blocks}
        held |= {block.block_id for block in self.transfers}
        if len(ids) != number or ids & held or 0 in ids:
            raise SoakError(f"asked for {number} blocks, got {sorted(ids)}; held: {sorted(held)}")
        self._contents.rewritten(ids)
        self._counts["blocks allocated"] += number
        return blocks

    def _free(self, request: SoakRequest) -> None:
        # vLLM frees a request's blocks last to first.
        self._pool.free_blocks(reversed(request.blocks))
        self._contents.freed(block.block_id for block in request.blocks)
        self._counts["blocks freed"] += len(request.blocks)
