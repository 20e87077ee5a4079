"""Keeps an engine's status page current."""

import time
from collections.abc import Callable

from dps_ray.commands import StepCommand
from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.engine.rank_reports import RankReports
from dps_ray.engine.status_page import StatusPage
from dps_ray.modes import Mode
from dps_ray.scheduling.states import UnitState
from dps_ray.scheduling.sum_manager import SumManager
from dps_ray.status import EngineStatus

PERIOD_S = 0.02
"""Counters on the page of an engine that computes are as old as this and one step at most."""


class StatusPublisher:
    """Assembles an ``EngineStatus`` from the scheduler's side of the engine and publishes it.

    What others act on is published at once: modes, units, requests that come and go. A step that
    changes none of these only moves counters, and these wait: assembling the record would take a
    small model's step some hundredths of its time.
    """

    def __init__(
        self,
        page: StatusPage,
        manager: SumManager,
        pool: ElasticBlockPool,
        ranks: RankReports,
        full_request_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page = page
        self._manager = manager
        self._pool = pool
        self._ranks = ranks
        self._full_request_tokens = full_request_tokens
        self._clock = clock
        self._tokens = {Mode.FULL: 0, Mode.FAST: 0}
        self._tokens_mixed = 0
        self._latest: tuple[object, ...] = ()
        self._counts = (0, 0, 0)
        self._due_s = 0.0
        self.preemptions = 0

    def count_tokens(self, command: StepCommand, tokens: int) -> None:
        """Credit sampled tokens to the precision of the pass that made them."""
        self._tokens[command.mode] += tokens
        if command.full_layers:
            self._tokens_mixed += tokens

    def publish_counts(self, *, running: int, waiting: int, full_requests: int) -> None:
        """As ``publish``, where nothing but these numbers can have changed since."""
        if (running, waiting, full_requests) != self._counts or self._clock() >= self._due_s:
            self.publish(running=running, waiting=waiting, full_requests=full_requests)

    def publish(self, *, running: int, waiting: int, full_requests: int) -> None:
        """Keep the page current; see the class for what that means."""
        manager, ledger = self._manager, self._manager.ledger
        urgent = (
            *(manager.mode, manager.pin, manager.restoring, manager.wants_restore, manager.fault),
            *(ledger.count(UnitState.BACKED), ledger.count(UnitState.RESTORING)),
            *(running, waiting, full_requests, manager.layers.count_full),
        )
        self._counts = (running, waiting, full_requests)
        now_s = self._clock()
        if urgent != self._latest or now_s >= self._due_s:
            self._latest, self._due_s = urgent, now_s + PERIOD_S
            self._write(running, waiting, full_requests)

    def _write(self, running: int, waiting: int, full_requests: int) -> None:
        manager, pool = self._manager, self._pool
        ledger, counters = manager.ledger, manager.counters
        restoring = ledger.count(UnitState.RESTORING)
        backed = ledger.count(UnitState.BACKED)
        free = pool.free_block_queue.num_free_blocks
        self._page.publish(
            EngineStatus(
                sequence=0,
                time_s=time.time(),
                mode=manager.mode,
                pin=manager.pin,
                restoring=manager.restoring,
                base_blocks=pool.first_elastic,
                total_blocks=pool.num_gpu_blocks,
                used_blocks=pool.live_blocks,
                free_blocks=free + ledger.kv_free_blocks,
                headroom_blocks=free + manager.obtainable_blocks,
                units=ledger.num_units,
                units_backed=backed,
                units_kv=ledger.num_units - backed - restoring,
                units_restoring=restoring,
                restore_progress=ledger.restore_progress if ledger.num_units else None,
                running=running,
                waiting=waiting,
                preemptions=self.preemptions,
                tokens_full=self._tokens[Mode.FULL],
                tokens_fast=self._tokens[Mode.FAST],
                switches_to_fast=counters.switches_to_fast,
                switches_to_full=counters.switches_to_full,
                restored_bytes=int(self._ranks.total("restored_bytes")),
                restore_busy_s=self._ranks.slowest("restore_busy_s"),
                restore_bytes_per_s=self._ranks.total("restore_bytes_per_s"),
                restore_left_s=manager.restore_left_s,
                resumed_bytes=int(self._ranks.total("resumed_bytes")),
                restores_cancelled=counters.restores_cancelled,
                restores_failed=counters.restores_failed,
                blocks_moved=counters.blocks_moved,
                prefixes_saved=counters.prefixes_saved,
                backup_bytes=int(self._ranks.total("backup_bytes")),
                last_restore_s=counters.last_restore_s,
                fault=manager.fault,
                wants_restore=manager.wants_restore,
                full_requests=full_requests,
                layers=manager.layers.count,
                layers_full=manager.layers.count_full,
                tokens_mixed=self._tokens_mixed,
                full_request_tokens=self._full_request_tokens,
            )
        )
