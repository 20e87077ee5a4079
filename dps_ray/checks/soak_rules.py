"""The parts that keep the safety rules, and for each rule a part that does without it.

The soak must fail with every one of these mutants: a rule whose absence goes unnoticed is either
not needed or not tested.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from dps_ray.checks.soak_memory import SoakMemory, SoakWorker
from dps_ray.commands import RestoreTask, StepCommand
from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.engine.rank_reports import RankReports
from dps_ray.memory.driver import Fence
from dps_ray.memory.region import Binding
from dps_ray.memory.segment_copy import SegmentCopy
from dps_ray.modes import Mode
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.permits import Permits
from dps_ray.scheduling.policy import Pressure
from dps_ray.scheduling.sum_manager import SumManager


@dataclass(frozen=True)
class Rules:
    """The classes a soak is built from; the defaults are the product's."""

    memory: type[SoakMemory] = SoakMemory
    manager: type[SumManager] = SumManager
    ledger: type[UnitLedger] = UnitLedger
    pool: type[ElasticBlockPool] = ElasticBlockPool
    reports: type[RankReports] = RankReports
    verify: bool = True
    binding: Binding = "fixed"
    """The one that a mutant needs to do harm."""
    queued_link: bool = False
    """Whether it takes a link that goes on after the call, as a GPU's does."""


# --- on the ranks ---------------------------------------------------------------------------------


class _DoesNotZero(SoakMemory):
    def apply(self, command: StepCommand, fence: Fence) -> None:
        super().apply(replace(command, zero=()), fence)


class _DoesNotCancel(SoakMemory):
    def apply(self, command: StepCommand, fence: Fence) -> None:
        super().apply(replace(command, cancel=()), fence)


class _OpenFence:
    def wait(self) -> None:
        return


class _DoesNotWaitForEarlierSteps(SoakMemory):
    def apply(self, command: StepCommand, fence: Fence) -> None:
        super().apply(command, _OpenFence())


class _ZeroesBeforeItCancels(SoakMemory):
    def apply(self, command: StepCommand, fence: Fence) -> None:
        super().apply(StepCommand(command.mode, zero=command.zero), fence)
        super().apply(replace(command, zero=()), fence)


class _ObeysOneStepLate(SoakMemory):
    _held = StepCommand(Mode.FULL)

    def apply(self, command: StepCommand, fence: Fence) -> None:
        held, self._held = self._held, command
        super().apply(held, fence)


class _DoesNotCopyMovedBlocks(SoakMemory):
    def apply(self, command: StepCommand, fence: Fence) -> None:
        super().apply(replace(command, move=()), fence)


class _KeepsCopies(SoakWorker):
    def __init__(self, *args: Any, **options: Any) -> None:
        self._copies: dict[tuple[int, int], SegmentCopy] = {}
        super().__init__(*args, **options)

    def _segment_copy(self, task: RestoreTask) -> SegmentCopy:
        where = task.unit, task.segment
        copy = self._copies.get(where)
        if copy is None or not copy.left_bytes:
            copy = self._copies[where] = super()._segment_copy(task)
        return copy


class _TrustsProgressOfStolenUnits(SoakMemory):
    worker_type = _KeepsCopies


class _SumsThroughHolds(SegmentCopy):
    def resume(self) -> None:
        self.resumed_bytes = self.copied_bytes


class _ReadsNothingAgain(SoakWorker):
    def _segment_copy(self, task: RestoreTask) -> SegmentCopy:
        copy = super()._segment_copy(task)
        copy.__class__ = _SumsThroughHolds
        return copy


class _TrustsWhatStoodThroughAHold(SoakMemory):
    worker_type = _ReadsNothingAgain


class _RebindsAtOnce(SoakWorker):
    def _bind(self, task: RestoreTask, fence: Fence) -> None:
        if not self._region.maps(task.segment, task.unit):
            with self._effect():
                self._region.rebind(task.segment, task.unit)
        self._region.driver.transfer.wait_for(fence)


class _RemapsUnderEarlierSteps(SoakMemory):
    worker_type = _RebindsAtOnce


class _ForgetsChunksInFlight(SoakWorker):
    def cancel(self, task: RestoreTask) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._in_effect)
            self._issued = None
            super().cancel(task)


class _StealsUnderChunksInFlight(SoakMemory):
    worker_type = _ForgetsChunksInFlight


# --- in the scheduler -----------------------------------------------------------------------------


class _BelievesOneRank(RankReports):
    def deliver(self, manager: SumManager) -> None:
        sections, self._sections = self._sections, self._sections[:1]
        super().deliver(manager)
        self._sections = sections


class _BelievesOutdatedReports(RankReports):
    def deliver(self, manager: SumManager) -> None:
        for task in manager.ledger.open_restores:
            if all(section.outcomes[task.unit] > 0 for section in self._sections):
                manager.on_restored(task.unit, task.epoch)
        super().deliver(manager)


class _FailsWithoutCancelling(SumManager):
    def on_restore_failed(self, unit: int, epoch: int, error: str) -> bool:
        known = super().on_restore_failed(unit, epoch, error)
        self._orders.cancel.clear()
        return known


class _StopsWithoutCancelling(SumManager):
    def set_permits(self, permits: Permits) -> None:
        before = list(self._orders.cancel)
        super().set_permits(permits)
        self._orders.cancel[:] = before


class _RestoresWhatItZeroes(SumManager):
    def restore_candidates(self) -> tuple[int, ...]:
        return self.ledger.restorable_units()


class _RestoresWhatItEmpties(SumManager):
    def restore_candidates(self) -> tuple[int, ...]:
        return tuple(
            unit for unit in self.ledger.restorable_units() if unit not in self._orders.zero
        )


class _CountsRestoringAsBacked(UnitLedger):
    @property
    def fully_backed(self) -> bool:
        return len(self._backed) + len(self._restoring) == self.num_units


class _ReusesEpochs(UnitLedger):
    def begin_restore(self, unit: int) -> RestoreTask:
        self._last_epoch = 0
        return super().begin_restore(unit)


class _KeepsLayersThatLoseTheirUnit(SumManager):
    _kept = frozenset[int]()

    def plan_step(self, pressure: Pressure) -> StepCommand:
        command = super().plan_step(pressure)
        if command.mode is Mode.FULL:
            self._kept = frozenset()
            return command
        self._kept |= {*command.full_layers}
        return replace(command, full_layers=tuple(sorted(self._kept)))


class _TakesRestoringSegmentsForBack(UnitLedger):
    def missing_segments(self) -> Iterator[int]:
        yield from self._waiting


# --- in the block pool ----------------------------------------------------------------------------


class _KeepsPrefixesOfRestoredUnits(ElasticBlockPool):
    def hide_unit(self, unit: int) -> None:
        for block in self._blocks_of(unit):
            self._unit_queues[unit].remove(block)


class _FreesWithoutTheLedger(ElasticBlockPool):
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        BlockPool.free_blocks(self, ordered_blocks)


class _MovesBlocksThatOthersHold(ElasticBlockPool):
    def _places_of(
        self, blocks: Sequence[KVCacheBlock]
    ) -> dict[int, list[tuple[list[KVCacheBlock], int]]]:
        places = super()._places_of(blocks)
        return {block.block_id: places[block.block_id][:1] * block.ref_cnt for block in blocks}


class _MovesBlocksWithoutTheirTables(ElasticBlockPool):
    def _places_of(
        self, blocks: Sequence[KVCacheBlock]
    ) -> dict[int, list[tuple[list[KVCacheBlock], int]]]:
        return {
            block.block_id: [(list(table), index) for table, index in places]
            for block, places in zip(blocks, super()._places_of(blocks).values(), strict=True)
        }


MUTANTS = {
    "a unit is zeroed before its first KV write": Rules(memory=_DoesNotZero),
    "a steal cancels the copy under way": Rules(memory=_DoesNotCancel),
    "a copy waits for every earlier step": Rules(memory=_DoesNotWaitForEarlierSteps),
    "the copy has ended before its unit is zeroed": Rules(memory=_ZeroesBeforeItCancels),
    "progress in a unit ends when it is stolen": Rules(memory=_TrustsProgressOfStolenUnits),
    "compute is held back behind chunks in flight": Rules(
        memory=_StealsUnderChunksInFlight, queued_link=True
    ),
    "a remap waits for earlier steps": Rules(memory=_RemapsUnderEarlierSteps, binding="any"),
    "what stood through a hold is read again": Rules(memory=_TrustsWhatStoodThroughAHold),
    "restored bytes are verified": Rules(verify=False),
    "orders are obeyed in their own step": Rules(memory=_ObeysOneStepLate),
    "a restore counts when every rank has it": Rules(reports=_BelievesOneRank),
    "reports name the restore they are about": Rules(reports=_BelievesOutdatedReports),
    "every restore has an epoch of its own": Rules(ledger=_ReusesEpochs),
    "a restore that failed on one rank ends on all": Rules(manager=_FailsWithoutCancelling),
    "a restore that the fleet stops ends on all ranks": Rules(manager=_StopsWithoutCancelling),
    "a unit zeroed in a step is not restored in it": Rules(manager=_RestoresWhatItZeroes),
    "a moved block's bytes are copied": Rules(memory=_DoesNotCopyMovedBlocks),
    "a unit that blocks leave in a step is not restored in it": Rules(
        manager=_RestoresWhatItEmpties
    ),
    "a block that others hold does not move": Rules(pool=_MovesBlocksThatOthersHold),
    "every table learns a moved block's new id": Rules(pool=_MovesBlocksWithoutTheirTables),
    "full mode waits for the last segment": Rules(ledger=_CountsRestoringAsBacked),
    "a layer is fast in the step that steals from it": Rules(manager=_KeepsLayersThatLoseTheirUnit),
    "a layer is full once its bytes are verified": Rules(ledger=_TakesRestoringSegmentsForBack),
    "prefixes in a unit end with its restore": Rules(pool=_KeepsPrefixesOfRestoredUnits),
    "the ledger learns of every freed block": Rules(pool=_FreesWithoutTheLedger),
}
"""Each safety rule, and the parts that break it."""
