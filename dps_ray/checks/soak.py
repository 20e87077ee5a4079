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

from vllm.v1.core.block_pool import BlockPool

from dps_ray.checks.soak_content import BlockContents
from dps_ray.checks.soak_links import FlakyLink, QueuedLink
from dps_ray.checks.soak_point import SoakError
from dps_ray.checks.soak_rank import SoakRank
from dps_ray.checks.soak_requests import BLOCK_TOKENS
from dps_ray.checks.soak_rules import Rules
from dps_ray.checks.soak_traffic import SoakTraffic
from dps_ray.commands import BlockMove
from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.engine.status_page import StatusPage
from dps_ray.memory.region import Binding
from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.block_precision import BlockPrecision
from dps_ray.scheduling.permits import Permits
from dps_ray.scheduling.policy import Pressure, SwitchLimits
from dps_ray.scheduling.retry import RetryLimits
from dps_ray.scheduling.states import UnitState

RANKS = 2
DWELL_S = 0.3
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
    queued_link
        Copies run behind the calls that ask for them, as on a GPU.

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
        queued_link: bool = False,
    ) -> None:
        rules = rules or Rules()
        self.counts = Counter[str]()
        self.now_s = 0.0
        self._revoked_steps = 0
        self._page = StatusPage.create(f"soak-{os.getpid()}-{next(_numbers)}")
        self.ranks = [
            SoakRank(
                binding, rules, self._page.rank(index), seed + index, by_layer,
                QueuedLink() if queued_link else FlakyLink(),
            )
            for index in range(RANKS)
        ]  # fmt: skip
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
        self.pool.precision = BlockPrecision()
        self._contents = BlockContents(shape.base_blocks, shape.blocks_per_unit, shape.units)
        self.traffic = SoakTraffic(self.pool, self._contents, self.base_blocks, self.counts)
        self.pool.tables = lambda: (request.blocks for request in self.traffic.requests)

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

    # --- the operator, the fleet, the link, the ranks -------------------------------------------

    def outgrow(self) -> None:
        """Take one unit more than is free, while copies are slow: others stand half copied."""
        self.stall_all()
        self.traffic.burst(max(self.manager.ledger.lendable_blocks - 1, 0))

    def pass_by(self, spare: int, late: bool, busy: bool) -> None:
        """A burst of one step: restores begin in lent units while older steps may be queued."""
        self.traffic.burst(spare)
        self.step(DWELL_S, late, busy)
        self.traffic.finish_all()
        self.step(0.0, late, busy)
        self.stall_all()
        # No unit is restored in the step that blocks leave it in.
        self.step(0.0, late, busy)

    def pin(self, pin: Pin) -> None:
        self.manager.set_pin(pin)

    def revoke(self, steps: int) -> None:
        """Take the permit to restore back for some steps, while copies are slow."""
        self.stall_all()
        self._revoked_steps = steps

    def damage(self, rank: int) -> None:
        """Let the next copy of one rank arrive with a wrong bit, while the others are slow."""
        self.stall_all()
        self.ranks[rank].driver.link.stall_next = False
        self.ranks[rank].driver.link.damage_next = True

    def stall(self, rank: int) -> None:
        """Let the next copy of one rank take longer than several steps."""
        self.ranks[rank].driver.link.stall_next = True

    def disturb(self) -> None:
        """Restores are held up half copied, and something that no fence knows writes there."""
        self.pass_by(0, late=False, busy=False)
        self.outgrow()
        self.step(0.0, late=False, busy=False)
        self.counts["held copies disturbed"] += sum(rank.memory.disturb() for rank in self.ranks)

    def stall_all(self) -> None:
        for index in range(len(self.ranks)):
            self.stall(index)

    def settle(self) -> None:
        """Wait until every restore has ended on all ranks, unless a burst holds them up."""
        for rank in self.ranks:
            rank.wait_restored() if self.manager.restoring else rank.driver.stream.synchronize()
        self._check_segments()

    def step(self, pause_s: float, late: bool, busy: bool) -> None:
        """Plan and launch one step; ``late`` leaves its forward pass for the next step to wait on.

        Orders are always obeyed while at most one earlier pass has not run. A ``busy`` step leaves
        restores to its own thread.
        """
        command = self.manager.plan_step(self._pressure())
        written = self.traffic.forward_pass()
        owned = self._contents.owned(self.manager.ledger)
        content = self._contents.words()
        for rank in self.ranks:
            rank.driver.stream.late = late
            rank.step(command, written, owned, content)
            if not late:
                rank.driver.stream.synchronize()
            rank.end_step(busy)
        self.counts["full steps" if command.mode is Mode.FULL else "fast steps"] += 1
        self.counts["fast steps with full layers"] += bool(command.full_layers)
        if not late:
            self._check_segments()
            self.manager.check_integrity()
        # The scheduler's next turn begins: the operations that follow are its allocation.
        self.now_s += pause_s
        revoked = self._revoked_steps > 0
        self._revoked_steps -= revoked
        self.counts["restores stopped"] += revoked and len(self.manager.ledger.open_restores)
        self.manager.set_permits(Permits(restore=not revoked, stop=revoked))
        self._reports.deliver(self.manager)
        if self.manager.may_compact:
            self.manager.compact(self._pressure())
        self.traffic.check_transfers()

    def close(self) -> None:
        """Tear the ranks down.

        Raises
        ------
        SoakError
            When memory was not given back.
        """
        self.counts["bytes not copied again"] += sum(rank.resumed_bytes for rank in self.ranks)
        self.counts["bytes copied between steps"] += sum(
            rank.driver.link.sliced_bytes for rank in self.ranks
        )
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

    def _check_segments(self) -> None:
        ledger = self.manager.ledger
        for unit in range(ledger.num_units):
            if ledger.state(unit) is UnitState.BACKED:
                segment = ledger.segment_of(unit)
                assert segment is not None
                for rank in self.ranks:
                    rank.check_segment(segment, unit)
                self.counts["segments compared"] += RANKS
