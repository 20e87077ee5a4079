"""An engine without a model: requests, scheduler and ranks on real memory, driven at random.

vLLM's block pool, the SUM manager and two ranks with real bytes are the product's own. The soak
plays vLLM's KV cache manager and the forward passes, and knows what every byte must be: each pass
writes its blocks, then compares every KV block, live or free; each step compares every segment that
counts as restored.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Self

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from dps_ray.checks.soak_content import BlockContents
from dps_ray.checks.soak_rank import SoakError, SoakRank
from dps_ray.checks.soak_requests import (
    BLOCK_TOKENS,
    TOPICS,
    SoakRequest,
    prefix_of,
    tag_of,
)
from dps_ray.checks.soak_rules import Rules
from dps_ray.commands import BlockMove
from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.engine.status_page import StatusPage
from dps_ray.memory.region import Binding
from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.block_precision import BlockPrecision
from dps_ray.scheduling.policy import Pressure, SwitchLimits
from dps_ray.scheduling.retry import RetryLimits
from dps_ray.scheduling.states import UnitState

RANKS = 2
DWELL_S = 0.3
MAX_TRANSFERS = 2
MAX_MOVES = 3
"""A unit is emptied over several steps."""

_numbers = count()


class Soak:
    """One engine's memory under random operations; every method but the readers is one operation.

    Parameters
    ----------
    seed
        Of the weights and of ``step``'s delays.
    binding
        As in ``DpsOptions``.
    rules
        The parts to build from; mutants replace one of them.
    by_layer
        Layers return one by one, as under ``return_by: layer``.

    Raises
    ------
    SoakError
        From any operation, when a byte or a book is not what it must be.
    """

    def __init__(
        self,
        seed: int,
        binding: Binding = "fixed",
        rules: Rules | None = None,
        by_layer: bool = False,
    ) -> None:
        rules = rules or Rules()
        self.counts = Counter[str]()
        self.now_s = 0.0
        self._page = StatusPage.create(f"soak-{os.getpid()}-{next(_numbers)}")
        self.ranks = [
            SoakRank(binding, rules, self._page.rank(index), seed + index, by_layer)
            for index in range(RANKS)
        ]
        self._reports = rules.reports(self._page, RANKS)
        shape = self._reports.geometry()
        self.base_blocks = shape.base_blocks
        blocks = shape.base_blocks + shape.elastic_blocks
        plain = BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.pool = ElasticBlockPool.make_elastic(plain, shape.base_blocks, shape.blocks_per_unit)
        self.pool.__class__ = rules.pool
        self.pool.manager = self.manager = rules.manager(
            rules.ledger(shape.units, shape.blocks_per_unit, binding=binding, in_order=by_layer),
            SwitchLimits(1.0, 0.6, DWELL_S, 0.0),
            self,
            clock=lambda: self.now_s,
            retry=RetryLimits(attempts=1000, first_pause_s=0.0),
            max_moves=MAX_MOVES,
            layers=self._reports.layers(),
            save_prefixes=True,
        )
        self.pool.tables = lambda: (request.blocks for request in self.requests)
        self.pool.precision = BlockPrecision()
        self.requests: list[SoakRequest] = []
        self.transfers: list[KVCacheBlock] = []
        """Blocks that something else than a request holds by id: they must not move."""
        self._contents = BlockContents(shape.base_blocks, shape.blocks_per_unit, shape.units)
        self._prefixes = [prefix_of(topic) for topic in range(TOPICS)]

    # --- the manager's view of the pool ----------------------------------------------------------

    def reveal_unit(self, unit: int) -> None:
        """A unit joins the KV cache: its blocks must be zero from the next step on."""
        self.pool.reveal_unit(unit)
        self._contents.zeroed(unit)

    def hide_unit(self, unit: int) -> None:
        self.pool.hide_unit(unit)

    @property
    def free_base_blocks(self) -> int:
        return self.pool.free_base_blocks

    def move_to_base(self, unit: int, limit: int) -> Sequence[BlockMove]:
        moves = self.pool.move_to_base(unit, limit)
        self._contents.moved(moves)
        return moves

    def save_prefixes(self, units: Sequence[int], limit: int) -> Mapping[int, Sequence[BlockMove]]:
        moves = self.pool.save_prefixes(units, limit)
        for of_unit in moves.values():
            self._contents.moved(of_unit)
        return moves

    # --- what vLLM's KV cache manager does -------------------------------------------------------

    def serve(self, topic: int, length: int, room: int) -> None:
        """Admit a prompt of ``length`` cacheable blocks, reusing what is cached, plus ``room``."""
        request = self._prefixes[topic]
        hashes = request.block_hashes[:length]
        hits: list[KVCacheBlock] = []
        for block_hash in hashes:
            found = self.pool.get_cached_block(block_hash, [0])
            if not found:
                break
            self._contents.must_hold(found[0].block_id, tag_of(block_hash))
            hits += found
        wanted = length - len(hits) + room
        reserved = sum(block.ref_cnt == 0 for block in hits)
        if not length + room or wanted + reserved > self.pool.get_num_free_blocks():
            return
        self.pool.touch(hits)
        blocks = hits + self._take(wanted)
        for block, block_hash in zip(blocks[len(hits) :], hashes[len(hits) :], strict=False):
            self._contents.cached(block.block_id, tag_of(block_hash))
        self.pool.cache_full_blocks(request, blocks, len(hits), length, BLOCK_TOKENS, 0)
        self.requests.append(SoakRequest(blocks, length))
        self.counts["prefix blocks hit"] += len(hits)

    def grow(self, pick: int) -> None:
        """Give a running request one more block."""
        if self.requests and self.pool.get_num_free_blocks():
            self.requests[pick % len(self.requests)].blocks += self._take(1)

    def burst(self, spare: int) -> None:
        """Take all blocks but ``spare``, lending whatever can be lent."""
        wanted = self.pool.get_num_free_blocks() - spare
        if wanted > 0:
            self.requests.append(SoakRequest(self._take(wanted), 0))

    def outgrow(self) -> None:
        """Take one unit more than is free, while copies are slow: others stand half copied."""
        self.stall_all()
        self.burst(max(self.manager.ledger.lendable_blocks - 1, 0))

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
            self.pool.free_blocks([self.transfers.pop(pick % MAX_TRANSFERS)])
        lent = [
            block
            for request in self.requests
            for block in request.blocks
            if block.block_id >= self.base_blocks
        ]
        if lent:
            block = lent[pick % len(lent)]
            self.pool.touch([block])
            self.transfers.append(block)
        elif self.transfers:
            self.pool.free_blocks([self.transfers.pop()])

    # --- the operator, the link, the ranks -------------------------------------------------------

    def pin(self, pin: Pin) -> None:
        self.manager.set_pin(pin)

    def damage(self, rank: int) -> None:
        """Let the next copy of one rank arrive with a wrong bit, while the others are slow."""
        self.stall_all()
        self.ranks[rank].driver.link.stall_next = False
        self.ranks[rank].driver.link.damage_next = True

    def stall(self, rank: int) -> None:
        """Let the next copy of one rank take longer than several steps."""
        self.ranks[rank].driver.link.stall_next = True

    def stall_all(self) -> None:
        for index in range(len(self.ranks)):
            self.stall(index)

    def settle(self) -> None:
        """Wait until every restore has ended on all ranks, unless a burst holds them up."""
        for rank in self.ranks:
            rank.wait_restored() if self.manager.restoring else rank.driver.stream.synchronize()
        self._check_segments()

    def step(self, pause_s: float, late: bool) -> None:
        """Plan and launch one step; ``late`` leaves its forward pass for the next step to wait on.

        Orders are always obeyed while at most one earlier pass has not run.
        """
        command = self.manager.plan_step(self._pressure())
        written = self._forward_pass()
        owned = self._contents.owned(self.manager.ledger)
        content = self._contents.words()
        for rank in self.ranks:
            rank.driver.stream.late = late
            rank.step(command, written, owned, content)
            if not late:
                rank.driver.stream.synchronize()
        self.counts["full steps" if command.mode is Mode.FULL else "fast steps"] += 1
        self.counts["fast steps with full layers"] += bool(command.full_layers)
        if not late:
            self._check_segments()
            self.manager.check_integrity()
        # The scheduler's next turn begins: the operations that follow are its allocation.
        self.now_s += pause_s
        self._reports.deliver(self.manager)
        if self.manager.may_compact:
            self.manager.compact(self._pressure())
        for block in self.transfers:
            if block.ref_cnt < 1:
                raise SoakError(f"block {block.block_id} was moved under a transfer")

    def close(self) -> None:
        """Tear the ranks down.

        Raises
        ------
        SoakError
            When memory was not given back.
        """
        self.counts["bytes not copied again"] += sum(rank.resumed_bytes for rank in self.ranks)
        left = [rank.close() for rank in self.ranks]
        self._page.remove()
        if any(left):
            raise SoakError(f"bytes left after teardown, by rank: {left}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- internals -------------------------------------------------------------------------------

    def _pressure(self) -> Pressure:
        return Pressure(self.pool.live_blocks, self.base_blocks - 1)

    def _take(self, number: int) -> list[KVCacheBlock]:
        blocks = self.pool.get_new_blocks(number)
        ids = {block.block_id for block in blocks}
        held = {block.block_id for request in self.requests for block in request.blocks}
        held |= {block.block_id for block in self.transfers}
        if len(ids) != number or ids & held or 0 in ids:
            raise SoakError(f"asked for {number} blocks, got {sorted(ids)}; held: {sorted(held)}")
        self._contents.rewritten(ids)
        self.counts["blocks allocated"] += number
        return blocks

    def _free(self, request: SoakRequest) -> None:
        # vLLM frees a request's blocks last to first.
        self.pool.free_blocks(reversed(request.blocks))
        self._contents.freed(block.block_id for block in request.blocks)
        self.counts["blocks freed"] += len(request.blocks)

    def _forward_pass(self) -> np.ndarray:
        """Blocks written: those given out since the last step, and the one each request is at."""
        for request in self.requests:
            request.scheduled = True
            if len(request.blocks) > request.prefix:
                self._contents.rewritten([request.blocks[-1].block_id])
        return self._contents.write()

    def _check_segments(self) -> None:
        ledger = self.manager.ledger
        for unit in range(ledger.num_units):
            if ledger.state(unit) is UnitState.BACKED:
                segment = ledger.segment_of(unit)
                assert segment is not None
                for rank in self.ranks:
                    rank.check_segment(segment, unit)
                self.counts["segments compared"] += RANKS
