"""vLLM's block pool with an elastic tail: base first, then KV units, then lent weight memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

from dps_ray.commands import BlockMove
from dps_ray.scheduling.block_precision import BlockPrecision
from dps_ray.scheduling.sum_manager import SumManager


class ElasticBlockPool(BlockPool):
    """A ``BlockPool`` whose last blocks belong to physical units.

    Blocks below ``first_elastic`` are vLLM's as ever and stay in ``free_block_queue``. The free
    blocks of a unit stand in a queue of its own while the KV cache owns the unit, and nowhere
    while the residual owns it. Which unit serves next, and when to lend, is the SUM manager's.

    An existing pool is upgraded in place by ``make_elastic``, because other objects already hold
    references to it.
    """

    manager: SumManager
    first_elastic: int
    precision: BlockPrecision
    full_prefixes_only = False
    """While set, a cached prefix is found only where full precision stands behind it."""
    recompute_fast_prefixes = False
    """Full mode never reuses what fast mode cached, so that it is not worth saving."""
    tables: Callable[[], Iterable[list[KVCacheBlock]]]
    """The lists in which requests hold their blocks, as they are now."""

    @staticmethod
    def make_elastic(
        pool: BlockPool, first_elastic: int, blocks_per_unit: int
    ) -> "ElasticBlockPool":
        """Turn a freshly built pool into an elastic one.

        ``manager``, ``tables`` and ``precision`` must be set right after.
        """
        pool.__class__ = ElasticBlockPool
        assert isinstance(pool, ElasticBlockPool)
        pool.first_elastic = first_elastic
        pool._blocks_per_unit = blocks_per_unit
        elastic = pool.blocks[first_elastic:]
        for block in elastic:
            pool.free_block_queue.remove(block)
        units = len(elastic) // blocks_per_unit
        pool._unit_queues = [FreeKVCacheBlockQueue([]) for _ in range(units)]
        pool._turns = count(1)
        pool._freed_at = [0] * len(pool.blocks)
        return pool

    # --- the SUM manager's view --------------------------------------------------------------

    def reveal_unit(self, unit: int) -> None:
        """Offer all blocks of ``unit``: it belongs to the KV cache from here on."""
        self._unit_queues[unit].append_n(self._blocks_of(unit))

    def hide_unit(self, unit: int) -> None:
        """Withdraw all blocks of ``unit`` and forget the prefixes cached in them."""
        for block in self._blocks_of(unit):
            self._unit_queues[unit].remove(block)
            self._maybe_evict_cached_block(block)

    @property
    def free_base_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def move_to_base(self, unit: int, limit: int) -> Sequence[BlockMove]:
        """Give live blocks of ``unit`` new homes in base memory, and tell whoever names them.

        A block moves only when the tables account for every reference to it: nobody else (a
        transfer, a pending copy) knows it by its old id.
        """
        live = [block for block in self._blocks_of(unit) if block.ref_cnt]
        places = self._places_of(live)
        movable = [block for block in live if len(places[block.block_id]) == block.ref_cnt]
        moved = movable[: min(limit, self.free_base_blocks)]
        if not moved:
            return ()
        targets = super().get_new_blocks(len(moved))
        for source, target in zip(moved, targets, strict=True):
            for table, index in places[source.block_id]:
                table[index] = target
            target.ref_cnt, source.ref_cnt = source.ref_cnt, 0
            self.move_block_hashes(source, target)
            self.precision.moved(source.block_id, target.block_id)
            self._unit_queues[unit].prepend_n([source])
        self.manager.ledger.release(unit, len(moved))
        return [
            BlockMove(source.block_id, target.block_id)
            for source, target in zip(moved, targets, strict=True)
        ]

    def save_prefixes(self, units: Sequence[int], limit: int) -> Mapping[int, Sequence[BlockMove]]:
        """Move cached prefixes of free blocks to base memory, in place of those freed earlier.

        A prefix that base memory caches as well stays behind, and so does one that full mode will
        not reuse.
        """
        cached = [
            block
            for unit in units
            for block in self._unit_queues[unit].get_all_free_blocks()
            if self._worth_saving(block)
        ]
        cached.sort(key=lambda block: self._freed_at[block.block_id], reverse=True)
        newest = {block.block_hash: block for block in reversed(cached)}
        cached = [block for block in cached if newest[block.block_hash] is block]
        targets: list[KVCacheBlock] = []
        # Taken ones are held until all are chosen: no block may be the target of two moves.
        for source in cached[:limit]:
            if not self._outlives_a_base_block(source):
                break
            targets += super().get_new_blocks(1)
        moves: dict[int, list[BlockMove]] = {}
        for source, target in reversed(list(zip(cached, targets, strict=False))):
            self.move_block_hashes(source, target)
            self.precision.moved(source.block_id, target.block_id)
            moves.setdefault(self._unit_of(source), []).append(
                BlockMove(source.block_id, target.block_id)
            )
            self.free_blocks([target])
        return moves

    # --- counting ----------------------------------------------------------------------------

    @property
    def live_blocks(self) -> int:
        """Blocks that requests hold, the null block not counted."""
        ledger = self.manager.ledger
        hidden = ledger.lendable_blocks
        free = self.free_block_queue.num_free_blocks + ledger.kv_free_blocks
        return self.num_gpu_blocks - 1 - free - hidden

    def get_num_free_blocks(self) -> int:
        if self._counts_hidden:
            return self.num_gpu_blocks - 1 - self.live_blocks
        return self.free_block_queue.num_free_blocks + self.manager.obtainable_blocks

    def reset_prefix_cache(self) -> bool:
        """Reset the prefix cache; blocks of units that the residual holds are not in use."""
        self._counts_hidden = True
        try:
            return super().reset_prefix_cache()
        finally:
            self._counts_hidden = False

    # --- vLLM's pool, tier by tier -----------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        from_base = min(num_blocks, self.free_block_queue.num_free_blocks)
        taken = super().get_new_blocks(from_base) if from_base else []
        missing = num_blocks - from_base
        if missing and not self.manager.lend_for(missing):
            raise ValueError(f"Cannot lend {missing} blocks from the pool")
        while missing:
            missing -= self._take_from_unit(missing, taken)
        self.precision.given_out(block.block_id for block in taken)
        return taken

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        if not self.full_prefixes_only:
            return super().get_cached_block(block_hash, kv_cache_group_ids)
        found = []
        for group in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group)
            twins = self._cached_under(key)
            block = next((twin for twin in twins if self.precision.is_full(twin.block_id)), None)
            if block is None:
                return None
            found.append(block)
        return found

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        base = [block for block in blocks if not self._is_elastic(block)]
        super().touch(base)
        for block in blocks:
            if not self._is_elastic(block):
                continue
            if block.ref_cnt == 0:
                unit = self._unit_of(block)
                self._unit_queues[unit].remove(block)
                self.manager.ledger.allocate(unit)
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        ordered = list(ordered_blocks)
        super().free_blocks(block for block in ordered if not self._is_elastic(block))
        for block in ordered:
            self._freed_at[block.block_id] = next(self._turns)
        for block in ordered:
            if not self._is_elastic(block):
                continue
            block.ref_cnt -= 1
            if block.ref_cnt:
                continue
            unit = self._unit_of(block)
            self.manager.ledger.release(unit)
            if block.block_hash is None or not self.enable_caching:
                self._unit_queues[unit].prepend_n([block])
            else:
                self._unit_queues[unit].append(block)

    # --- internals ---------------------------------------------------------------------------

    _blocks_per_unit: int
    _counts_hidden = False
    """While set, all blocks that no request holds count as free, wherever their memory is."""
    _unit_queues: list[FreeKVCacheBlockQueue]
    _turns: Iterator[int]
    _freed_at: list[int]
    """When each block was last given back, in turns."""

    def _take_from_unit(self, wanted: int, taken: list[KVCacheBlock]) -> int:
        unit = self.manager.ledger.pick_unit()
        assert unit is not None, "lend_for promised enough free blocks"
        here = min(wanted, self._unit_queues[unit].num_free_blocks)
        self.manager.ledger.allocate(unit, here)
        for block in self._unit_queues[unit].popleft_n(here):
            if self.enable_caching:
                self._maybe_evict_cached_block(block)
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_allocated(block)
            taken.append(block)
        return here

    def _worth_saving(self, block: KVCacheBlock) -> bool:
        if block.block_hash is None:
            return False
        if self.recompute_fast_prefixes and not self.precision.is_full(block.block_id):
            return False
        twins = self._cached_under(block.block_hash)
        return all(self._is_elastic(twin) for twin in twins)

    def _outlives_a_base_block(self, block: KVCacheBlock) -> bool:
        """Whether the base block that is used next was freed before ``block``, or is blank."""
        if not self.free_block_queue.num_free_blocks:
            return False
        oldest = self.free_block_queue.fake_free_list_head.next_free_block
        assert oldest is not None
        return oldest.block_hash is None or (
            self._freed_at[oldest.block_id] < self._freed_at[block.block_id]
        )

    def _cached_under(self, key: BlockHashWithGroupId) -> Iterable[KVCacheBlock]:
        """All blocks that cache one prefix: as fast mode wrote it, and recomputed since."""
        cached = self.cached_block_hash_to_block._cache.get(key, {})
        return cached.values() if isinstance(cached, dict) else [cached]

    def _places_of(
        self, blocks: Sequence[KVCacheBlock]
    ) -> dict[int, list[tuple[list[KVCacheBlock], int]]]:
        """Where each block stands in the requests' tables, by block id."""
        places: dict[int, list[tuple[list[KVCacheBlock], int]]]
        places = {block.block_id: [] for block in blocks}
        for table in self.tables():
            for index, block in enumerate(table):
                if block.block_id in places:
                    places[block.block_id].append((table, index))
        return places

    def _is_elastic(self, block: KVCacheBlock) -> bool:
        return block.block_id >= self.first_elastic

    def _unit_of(self, block: KVCacheBlock) -> int:
        return (block.block_id - self.first_elastic) // self._blocks_per_unit

    def _blocks_of(self, unit: int) -> list[KVCacheBlock]:
        start = self.first_elastic + unit * self._blocks_per_unit
        return self.blocks[start : start + self._blocks_per_unit]
