"""vLLM's scheduler with the SUM manager beside it: every step carries a ``StepCommand``."""

import logging
import time
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from dps_ray.config import DpsConfigError
from dps_ray.engine.block_pool import ElasticBlockPool
from dps_ray.engine.configure import engine_options
from dps_ray.engine.floors import FullRequests, TokenOrigins, insists_on_full
from dps_ray.engine.idle import wait_when_idle
from dps_ray.engine.publisher import StatusPublisher
from dps_ray.engine.rank_reports import RankReports
from dps_ray.engine.status_page import StatusPage
from dps_ray.engine.step_writes import StepWrites
from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.block_precision import BlockPrecision
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.policy import Pressure, SwitchLimits
from dps_ray.scheduling.sum_manager import SumManager

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Mixin
else:
    # The mixin stands before either scheduler in the method resolution order.
    _Mixin = object

logger = logging.getLogger("vllm.dps")

_IN_FLIGHT_TOKENS = 2
"""Tokens that asynchronous scheduling may reserve beyond a request's last."""


class ElasticScheduling(_Mixin):
    """Mixin over vLLM's schedulers: elastic pool, modes, restores and the status page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wait_when_idle()
        options = engine_options(self.vllm_config)
        assert options.key is not None
        self._page = StatusPage.attach(options.key)
        self._page.adopt()
        self._ranks = RankReports(self._page, self.vllm_config.parallel_config.world_size)
        shape = self._ranks.geometry()
        if shape.base_blocks + shape.elastic_blocks != self.kv_cache_config.num_blocks:
            raise DpsConfigError(
                f"the ranks built {shape.base_blocks} + {shape.elastic_blocks} KV blocks, the "
                f"scheduler counts {self.kv_cache_config.num_blocks}: size the KV cache with "
                "kv_cache_memory_bytes only"
            )
        lendable_units = shape.units if shape.elastic_blocks else 0
        ledger = UnitLedger(
            lendable_units,
            shape.blocks_per_unit,
            binding=options.binding,
            in_order=options.return_by == "layer",
        )
        pool = ElasticBlockPool.make_elastic(
            self.kv_cache_manager.block_pool, shape.base_blocks, shape.blocks_per_unit
        )
        limits = SwitchLimits(
            high_watermark=options.high_watermark,
            low_watermark=options.low_watermark,
            min_fast_dwell_s=options.min_fast_dwell_s,
            min_full_dwell_s=options.min_full_dwell_s,
            trend_horizon_s=options.trend_horizon_s,
        )
        pool.manager = self.sum_manager = SumManager(
            ledger,
            limits,
            pool,
            clock=time.monotonic,
            pin=options.pin,
            max_moves=options.compaction_blocks_per_step,
            layers=self._ranks.layers(),
            save_prefixes=options.save_prefixes and pool.enable_caching,
        )
        self._writes = StepWrites(self.kv_cache_manager.coordinator.single_type_managers)
        self._gave_up = False
        self._ending = False
        pool.tables = self._block_tables
        pool.precision = BlockPrecision()
        self._recompute_fast_prefixes = options.reuse_fast_prefixes == "recompute"
        pool.recompute_fast_prefixes = self._recompute_fast_prefixes
        self._find_prefix = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = self._find_prefix_in_precision
        self._pool = pool
        self._full_requests = FullRequests(self._tokens_in_base_blocks(), time.monotonic)
        self._origins = TokenOrigins()
        self._publisher = StatusPublisher(
            self._page, self.sum_manager, pool, self._ranks, self._full_requests.limit_tokens
        )
        self._publish()
        logger.info("dps: pin this engine with dps-ray admin pin MODE --key %s", options.key)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._obey_operator()
        self._obey_fleet()
        self._ranks.deliver(self.sum_manager)
        if not self.sum_manager.settled:
            self._report_giving_up()
            if self.sum_manager.may_compact:
                self.sum_manager.compact(self._pressure())
        # vLLM's own list of requests to end with an error at the next output.
        if late := self._full_requests.give_up(self.mode):
            self.grammar_compile_error_reqs.update(late)
        held = self._hold_back()
        output = super().schedule(*args, **kwargs)
        # Nothing ends a request while a step is scheduled, so all of them still wait.
        for request in reversed(held):
            self.waiting.prepend_request(request)
        self._full_requests.started(output.num_scheduled_tokens)
        before = self.sum_manager.latest
        output.dps = self.sum_manager.plan_step(self._pressure())
        if self._pool.enable_caching:
            self._pool.precision.note_step(
                output.dps.mode, self._writes.of(output, output.dps.mode)
            )
        if output.dps is before:
            self._publish_counts()
        else:
            self._publish()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        sampled = sum(len(tokens) for tokens in model_runner_output.sampled_token_ids or ())
        self._publisher.count_tokens(scheduler_output.dps, sampled)
        gave_up = self._full_requests.gave_up()
        result = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in result.values():
            self._origins.credit(outputs.outputs, scheduler_output.dps.mode, gave_up)
        self._publish_counts()
        return result

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self._full_requests.admit(request):
            return
        logger.warning(
            "dps: request %s insists on full precision with a prompt of %d tokens, the base KV "
            "blocks hold %d: it ends with an error",
            request.request_id, request.num_prompt_tokens, self._full_requests.limit_tokens,
        )  # fmt: skip
        self.grammar_compile_error_reqs.add(request.request_id)

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        finished = super().finish_requests(*args, **kwargs)
        self._origins.forget(request.request_id for request in finished)
        return finished

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._full_requests.remove(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def has_requests(self) -> bool:
        return self.has_live_requests() or (
            not self._ending
            and (
                self.sum_manager.has_pending_work
                or self._page.requested_pin() not in (None, self.sum_manager.pin)
            )
        )

    def leave_lent(self) -> None:
        """Stop counting lent memory as work: the engine is about to end, and the fleet's permit
        to restore may never come."""
        self._ending = True

    def has_live_requests(self) -> bool:
        """Whether there is anything to compute or to tell a client."""
        return super().has_requests()

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        self._publisher.preemptions += 1
        return super()._preempt_request(*args, **kwargs)

    def shutdown(self) -> None:
        super().shutdown()
        self._page.remove()

    def _obey_operator(self) -> None:
        pin = self._page.requested_pin()
        if pin is not None and pin is not self.sum_manager.pin:
            self.sum_manager.set_pin(pin)

    def _report_giving_up(self) -> None:
        gave_up = self.sum_manager.gave_up
        if gave_up and not self._gave_up:
            logger.error("dps: the replica stays in fast mode: %s", self.sum_manager.fault)
        self._gave_up = gave_up

    def _find_prefix_in_precision(self, request: Request) -> Any:
        self._pool.full_prefixes_only = insists_on_full(request) or (
            self._recompute_fast_prefixes and self._next_step_may_be_full()
        )
        try:
            return self._find_prefix(request)
        finally:
            self._pool.full_prefixes_only = False

    def _next_step_may_be_full(self) -> bool:
        manager = self.sum_manager
        return manager.pin is not Pin.FAST and manager.ledger.mode_allowed() is Mode.FULL

    def _block_tables(self) -> Iterator[list[KVCacheBlock]]:
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            yield from manager.req_to_blocks.values()

    def _obey_fleet(self) -> None:
        self.sum_manager.set_permits(self._page.permits(hold_full=len(self._full_requests) > 0))

    def _tokens_in_base_blocks(self) -> int:
        """Tokens of a request that never needs a block of a unit: each group of layers has tables
        of its own."""
        groups = self.kv_cache_config.kv_cache_groups
        blocks = (self._pool.first_elastic - 1) // len(groups)
        smallest = min(group.kv_cache_spec.block_size for group in groups)
        return blocks * smallest - _IN_FLIGHT_TOKENS

    def _hold_back(self) -> list[Request]:
        """Take waiting requests that may not run out of the queues."""
        barred = self._full_requests.barred(self.mode)
        if not barred:
            return []
        held: list[Request] = []
        for queue in (self.skipped_waiting, self.waiting):
            insisting = [r for r in queue if r.request_id in barred]
            queue.remove_requests(insisting)
            held += insisting
        return held

    def _pressure(self) -> Pressure:
        base_blocks = self._pool.first_elastic - 1
        waiting_requests = len(self.waiting) + len(self.skipped_waiting)
        return Pressure(
            used_blocks=self._pool.live_blocks,
            base_blocks=base_blocks,
            waiting_requests=waiting_requests,
            waiting_blocks=self._waiting_blocks(base_blocks) if waiting_requests else 0,
        )

    def _waiting_blocks(self, enough: int) -> int:
        """Blocks that waiting requests will need, summed up until there are ``enough``: no
        threshold lies above the base blocks."""
        # Requests that wait for full mode must not be what keeps it from returning.
        held = self._full_requests.barred(self.mode)
        blocks = 0
        for request in chain(self.waiting, self.skipped_waiting):
            if request.request_id in held:
                continue
            blocks += -(-request.num_tokens // self.block_size)
            if blocks >= enough:
                break
        return blocks

    def _publish_counts(self) -> None:
        """What a pass changes by itself: requests come, end and are preempted."""
        running, waiting = self.get_request_counts()
        self._publisher.publish_counts(
            running=running, waiting=waiting, full_requests=len(self._full_requests)
        )

    def _publish(self) -> None:
        running, waiting = self.get_request_counts()
        self._publisher.publish(
            running=running, waiting=waiting, full_requests=len(self._full_requests)
        )

    @property
    def mode(self) -> Mode:
        """Mode of the latest planned step."""
        return self.sum_manager.mode


class DpsScheduler(ElasticScheduling, Scheduler):
    """Elastic scheduling, one step at a time."""


class DpsAsyncScheduler(ElasticScheduling, AsyncScheduler):
    """Elastic scheduling over vLLM's asynchronous scheduler."""
