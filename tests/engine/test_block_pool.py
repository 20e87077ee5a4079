"""vLLM's real block pool, made elastic, under random histories of requests and restores.

The same histories run against pools that lack one rule each; every one of those must be caught, or
the test proves nothing.
"""

from collections.abc import Iterator
from itertools import takewhile

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.modes import Mode
from dps_ray.scheduling.block_precision import Written
from dps_ray.scheduling.permits import Permits
from dps_ray.scheduling.states import LedgerError

from .pool_machine import BASE_BLOCKS, BLOCK_TOKENS, DWELL_S, PoolMachine, hasher

TestElasticBlockPool = PoolMachine.TestCase
TestElasticBlockPool.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)


class KeepsPrefixesOfLentMemory(ElasticBlockPool):
    def hide_unit(self, unit: int) -> None:
        for block in self._blocks_of(unit):
            self._unit_queues[unit].remove(block)


class KeepsPrefixesOfReusedBlocks(ElasticBlockPool):
    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        return False


class TouchesWithoutTheLedger(ElasticBlockPool):
    def touch(self, blocks: list[KVCacheBlock]) -> None:  # type: ignore[override]
        for block in blocks:
            if self._is_elastic(block) and block.ref_cnt == 0:
                self._unit_queues[self._unit_of(block)].remove(block)
                block.ref_cnt = 1
            else:
                super().touch([block])


class FreesWithoutTheLedger(ElasticBlockPool):
    def free_blocks(self, ordered_blocks: Iterator[KVCacheBlock]) -> None:  # type: ignore[override]
        BlockPool.free_blocks(self, ordered_blocks)


class PromisesHiddenBlocks(ElasticBlockPool):
    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks + (
            self.manager.ledger.kv_free_blocks + self.manager.ledger.lendable_blocks
        )


class ForgetsToReveal(ElasticBlockPool):
    def reveal_unit(self, unit: int) -> None:
        self._unit_queues[unit].append_n(self._blocks_of(unit)[1:])


@pytest.mark.parametrize(
    "mutant",
    [
        KeepsPrefixesOfLentMemory,
        KeepsPrefixesOfReusedBlocks,
        TouchesWithoutTheLedger,
        FreesWithoutTheLedger,
        PromisesHiddenBlocks,
        ForgetsToReveal,
    ],
)
def test_machine_catches_a_pool_that(mutant: type[ElasticBlockPool]) -> None:
    machine = type("MutantMachine", (PoolMachine,), {"pool_class": mutant})
    with pytest.raises((AssertionError, LedgerError, RuntimeError, ValueError)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=150,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )


class SmallPool(PoolMachine):
    """The machine's pool, driven by hand: prompts of a topic share their prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.build(binding="fixed", full_dwell_s=0.0, caching=True, save_prefixes=True)

    def play(self, topic: int, length: int) -> None:
        self.serve(topic, length, 0)
        self.pool.free_blocks(reversed(self.requests.pop()))

    def cached(self, topic: int) -> list[int]:
        """Ids of the blocks that cache a topic, one after the other until the first miss."""
        request = Request(
            f"r{next(self.names)}", [topic] * 16 * BLOCK_TOKENS, SamplingParams(), None,
            block_hasher=hasher,
        )  # fmt: skip
        hits = (self.pool.get_cached_block(block_hash, [0]) for block_hash in request.block_hashes)
        return [hit[0].block_id for hit in takewhile(bool, hits) if hit]

    def return_to_full(self) -> None:
        while not self.manager.ledger.fully_backed:
            self.step(DWELL_S)
            for task in self.manager.ledger.open_restores:
                self.manager.on_restored(task.unit, task.epoch)


def test_the_newest_prefixes_survive_the_return_in_place_of_the_oldest() -> None:
    small = SmallPool()
    small.play(topic=0, length=5)
    small.requests.append(small.take(1))
    small.play(topic=1, length=8)
    small.pool.free_blocks(reversed(small.requests.pop()))
    assert any(block >= BASE_BLOCKS for block in small.cached(1))
    small.return_to_full()
    assert len(small.cached(1)) >= 4
    assert all(block < BASE_BLOCKS for block in small.cached(1))
    assert small.cached(0) == []
    assert small.manager.counters.prefixes_saved > 0
    small.every_block_is_in_one_place()
    small.cached_prefixes_are_where_the_pool_says()


def test_full_mode_that_recomputes_fast_prefixes_saves_none_of_them() -> None:
    small = SmallPool()
    small.pool.recompute_fast_prefixes = True
    small.serve(1, 8, 0)
    small.pool.precision.note_step(Mode.FAST, [Written(sorted(small.held), None)])
    small.pool.free_blocks(reversed(small.requests.pop()))
    small.return_to_full()
    assert small.manager.counters.prefixes_saved == 0


def test_idle_prefix_cache_resets_as_vllms_own_whatever_the_residual_holds() -> None:
    machine = SmallPool()
    pool = machine.pool
    pool.enable_kv_cache_events = True
    machine.serve(topic=0, length=3, room=0)
    assert pool.cached_block_hash_to_block._cache
    assert not pool.reset_prefix_cache()
    pool.free_blocks(machine.requests.pop())
    machine.manager.set_permits(Permits(fast=False))  # units of the residual are out of reach
    assert pool.reset_prefix_cache()
    assert not pool.cached_block_hash_to_block._cache
    assert all(block.block_hash is None for block in pool.blocks)
    assert any(isinstance(event, AllBlocksCleared) for event in pool.take_events())
