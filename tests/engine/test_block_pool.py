"""vLLM's real block pool, made elastic, under random histories of requests and restores.

The same histories run against pools that lack one rule each; every one of those must be caught, or
the test proves nothing.
"""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.scheduling.states import LedgerError

from .pool_machine import PoolMachine

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
