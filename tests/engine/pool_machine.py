"""Random histories of requests and restores over vLLM's real block pool, made elastic."""

from itertools import count
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.request import Request

from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.modes import Pin
from dps_ray.scheduling.block_precision import BlockPrecision
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.policy import Pressure, SwitchLimits
from dps_ray.scheduling.retry import RetryLimits
from dps_ray.scheduling.sum_manager import SumManager

UNITS, BLOCKS_PER_UNIT, BASE_BLOCKS, BLOCK_TOKENS = 4, 3, 6, 2
TOTAL_BLOCKS = BASE_BLOCKS + UNITS * BLOCKS_PER_UNIT
OBTAINABLE = TOTAL_BLOCKS - 1
"""Every block but the null block."""
DWELL_S = 1.0
WEIGHTS = b"weights"
UNWRITTEN = b"unwritten"

init_none_hash(sha256)
hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)


class PoolMachine(RuleBasedStateMachine):
    """Plays vLLM's KV cache manager and the ranks, and knows what every block contains."""

    pool_class: ClassVar[type[ElasticBlockPool]] = ElasticBlockPool

    @initialize(
        binding=st.sampled_from(["fixed", "any"]),
        full_dwell_s=st.sampled_from([0.0, DWELL_S]),
        caching=st.sampled_from([True, True, True, False]),
        save_prefixes=st.booleans(),
    )
    def build(self, binding: str, full_dwell_s: float, caching: bool, save_prefixes: bool) -> None:
        self.now_s = 0.0
        self.caching = caching
        plain = BlockPool(TOTAL_BLOCKS, enable_caching=caching, hash_block_size=BLOCK_TOKENS)
        self.pool = ElasticBlockPool.make_elastic(plain, BASE_BLOCKS, BLOCKS_PER_UNIT)
        self.pool.__class__ = self.pool_class
        self.pool.manager = self.manager = SumManager(
            UnitLedger(UNITS, BLOCKS_PER_UNIT, binding=binding),  # type: ignore[arg-type]
            SwitchLimits(1.0, 0.6, DWELL_S, full_dwell_s),
            self.pool,
            clock=lambda: self.now_s,
            retry=RetryLimits(attempts=10, first_pause_s=0.1),
            max_moves=2,
            save_prefixes=save_prefixes,
        )
        self.pool.tables = lambda: self.requests
        self.pool.precision = BlockPrecision()
        self.names = count()
        self.requests: list[list[KVCacheBlock]] = []
        self.contents: dict[int, bytes] = dict.fromkeys(range(TOTAL_BLOCKS), UNWRITTEN)
        for unit in range(UNITS):
            self.fill(unit, WEIGHTS)

    def fill(self, unit: int, content: bytes) -> None:
        start = BASE_BLOCKS + unit * BLOCKS_PER_UNIT
        self.contents |= dict.fromkeys(range(start, start + BLOCKS_PER_UNIT), content)

    @property
    def held(self) -> set[int]:
        return {block.block_id for request in self.requests for block in request}

    # --- what vLLM's KV cache manager does ---------------------------------------------------

    @rule(topic=st.integers(0, 2), length=st.integers(0, 8), room=st.integers(0, 2))
    def serve(self, topic: int, length: int, room: int) -> None:
        """A prompt of ``length`` full blocks whose cached prefix is reused, and ``room`` blocks
        for what it will generate. All prompts of a topic begin alike."""
        tokens = [topic] * (length * BLOCK_TOKENS)
        request = Request(
            f"r{next(self.names)}", tokens, SamplingParams(), None, block_hasher=hasher
        )
        hashes = request.block_hashes
        hits: list[KVCacheBlock] = []
        for block_hash in hashes:
            found = self.pool.get_cached_block(block_hash, [0])
            if not found:
                break
            assert self.contents[found[0].block_id] == block_hash, "a hit on other contents"
            hits += found
        fresh = len(hashes) - len(hits) + room
        reserved = sum(block.ref_cnt == 0 for block in hits)
        if fresh + reserved > self.pool.get_num_free_blocks():
            return
        self.pool.touch(hits)
        blocks = hits + self.take(fresh)
        for block, block_hash in zip(blocks[len(hits) :], hashes[len(hits) :], strict=False):
            self.contents[block.block_id] = block_hash
        if self.caching:
            self.pool.cache_full_blocks(
                request, blocks, len(hits), len(hashes), BLOCK_TOKENS, kv_cache_group_id=0
            )
        self.requests.append(blocks)

    @rule(topic=st.integers(0, 2), length=st.integers(4, 8))
    def converse(self, topic: int, length: int) -> None:
        """A request ends and its next turn begins: free blocks are hit."""
        before = len(self.requests)
        self.serve(topic, length, 0)
        if len(self.requests) > before:
            self.pool.free_blocks(reversed(self.requests.pop()))
            self.serve(topic, length, 1)

    def take(self, number: int) -> list[KVCacheBlock]:
        before = self.held
        blocks = self.pool.get_new_blocks(number)
        ids = {block.block_id for block in blocks}
        assert len(blocks) == len(ids) == number, "a block twice, or too few"
        assert not ids & before, "a block that a request holds"
        assert 0 not in ids, "the null block"
        for block in blocks:
            assert (block.ref_cnt, block.block_hash) == (1, None)
        self.contents |= dict.fromkeys(ids, UNWRITTEN)
        return blocks

    @rule()
    def take_all_that_is_promised(self) -> None:
        self.requests.append(self.take(self.pool.get_num_free_blocks()))

    @rule(more=st.integers(1, 3))
    def ask_for_more_than_is_promised(self, more: int) -> None:
        before = self.pool.get_num_free_blocks()
        with pytest.raises(ValueError, match="Cannot get"):
            self.pool.get_new_blocks(before + more)
        assert self.pool.get_num_free_blocks() == before

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish_request(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        # vLLM frees a request's blocks last to first.
        self.pool.free_blocks(reversed(self.requests.pop(index)))

    @rule()
    def finish_all(self) -> None:
        while self.requests:
            self.pool.free_blocks(reversed(self.requests.pop()))

    @rule(blocks=st.sets(st.integers(1, TOTAL_BLOCKS - 1), max_size=4))
    def evict(self, blocks: set[int]) -> None:
        self.pool.evict_blocks(blocks)

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.held)
        if not self.held:
            assert len(self.pool.cached_block_hash_to_block) == 0

    # --- steps, ranks, operator --------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, DWELL_S / 2, DWELL_S]))
    def step(self, seconds: float) -> None:
        self.now_s += seconds
        self.compact()
        command = self.manager.plan_step(Pressure(len(self.held), BASE_BLOCKS - 1))
        for task in command.restore:
            self.fill(task.unit, WEIGHTS)

    @rule()
    def compact(self) -> None:
        """The next step's scheduling begins."""
        before = {block: self.pool.blocks[block].block_hash for block in self.held}
        lengths = [len(request) for request in self.requests]
        if not self.manager.may_compact:
            return
        ordered = len(self.manager._orders.move)
        self.manager.compact(Pressure(len(self.held), BASE_BLOCKS - 1))
        moves = self.manager._orders.move[ordered:]
        for move in moves:
            self.contents[move.target] = self.contents[move.source]
            if move.source in before:
                assert self.pool.blocks[move.target].block_hash == before[move.source]
        assert len({move.target for move in moves}) == len(moves), "two moves to one block"
        assert [len(request) for request in self.requests] == lengths

    @rule()
    def fall_calm(self) -> None:
        """Every request ends and time passes: what it takes for restores to begin."""
        self.finish_all()
        self.step(DWELL_S)

    @precondition(lambda self: self.manager.ledger.open_restores)
    @rule(data=st.data(), works=st.booleans())
    def end_restore(self, data: st.DataObject, works: bool) -> None:
        task = data.draw(st.sampled_from(self.manager.ledger.open_restores))
        if works:
            assert self.manager.on_restored(task.unit, task.epoch)
        else:
            assert self.manager.on_restore_failed(task.unit, task.epoch, "broken link")

    @rule(pin=st.sampled_from([Pin.AUTO, Pin.AUTO, *Pin]))
    def set_pin(self, pin: Pin) -> None:
        self.manager.set_pin(pin)

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        base = ids(self.pool.free_block_queue)
        units = [ids(queue) for queue in self.pool._unit_queues]
        hidden = self.hidden_blocks
        places = [*base, *self.held, *hidden, *(block for unit in units for block in unit)]
        assert sorted(places) == list(range(1, TOTAL_BLOCKS))
        assert all(block < BASE_BLOCKS for block in base)
        for unit, blocks in enumerate(units):
            assert {self.unit_of(block) for block in blocks} <= {unit}

    @invariant()
    def reference_counts_are_those_of_the_requests(self) -> None:
        for block in self.pool.blocks[1:]:
            holders = sum(block in request for request in self.requests)
            assert block.ref_cnt == holders

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.live_blocks == len(self.held)
        free = OBTAINABLE - len(self.held)
        may_lend = self.manager._may_lend()
        assert self.pool.get_num_free_blocks() == free - (
            0 if may_lend else len(self.hidden_blocks)
        )

    @invariant()
    def cached_prefixes_are_where_the_pool_says(self) -> None:
        for block in self.pool.blocks:
            if block.block_hash is None:
                continue
            assert block.block_id not in self.hidden_blocks, "a prefix in weight memory"
            # The last four bytes of the key name the KV cache group.
            assert self.contents[block.block_id] == block.block_hash[:-4]
        for found in self.pool.cached_block_hash_to_block._cache.values():
            for block in found.values() if isinstance(found, dict) else [found]:
                assert block.block_hash is not None, "a prefix of a block that forgot it"

    @invariant()
    def ledger_is_sound(self) -> None:
        self.manager.check_integrity()

    @property
    def hidden_blocks(self) -> set[int]:
        """Blocks in units that hold a residual segment, or are about to."""
        ledger = self.manager.ledger
        return {
            block
            for block in range(BASE_BLOCKS, TOTAL_BLOCKS)
            if ledger.segment_of(self.unit_of(block)) is not None
        }

    @staticmethod
    def unit_of(block: int) -> int:
        return (block - BASE_BLOCKS) // BLOCKS_PER_UNIT


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    blocks = [block.block_id for block in queue.get_all_free_blocks()]
    assert len(blocks) == queue.num_free_blocks
    return blocks
