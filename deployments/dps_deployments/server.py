"""One replica: Ray's LLM server, plus the fleet's eyes on its engine."""

import asyncio
import time
from typing import Any

from dps_autoscaling.signals import to_stats as to_stats_for_scaling
from pydantic import BaseModel, ConfigDict
from ray.serve.llm import LLMServer

from dps_deployments.controller_client import ControllerClient
from dps_deployments.engine_gate import EngineGate
from dps_deployments.hang_watch import HangWatch, kill_engine
from dps_deployments.hints import to_stats
from dps_deployments.pinning import PinKeeper
from dps_deployments.probe import ReplicaProbe
from dps_deployments.rank_watch import RankWatch
from dps_deployments.ray_adapter import engine_client, replica_identity, skip_fetching, stop_flag
from dps_deployments.reporter import report_forever
from dps_deployments.revision import revision
from dps_ray.config import parse_options
from dps_ray.engine.admission import hook_front
from dps_ray.engine.status_page import StatusPage
from dps_ray.engine.warm_up import warm_up
from dps_ray.fleet.permits import ReplicaPermits
from dps_ray.fleet.reporting import ReportOptions
from dps_ray.modes import Mode, Pin
from dps_ray.status import EngineStatus

FLEET_CONFIG_KEY = "dps_fleet"
"""Entry of ``LLMConfig.experimental_configs`` that carries ``ServerFleetOptions``."""


class ServerFleetOptions(BaseModel):
    """What a replica must know about the fleet; set by the app builder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    controller_app: str
    """Application the fleet controller is deployed in."""
    report: ReportOptions = ReportOptions()


class DpsLLMServer(LLMServer):
    """``ray.serve.llm`` server that reports its engine to the fleet controller.

    Any vLLM engine works: one without ``quantization: dps`` is reported as a full-mode replica of
    which nothing else is known.
    """

    async def start(self) -> None:
        """Start the engine; reports begin before it is up, as ``starting``."""
        identity = replica_identity()
        options = ServerFleetOptions(**self._llm_config.experimental_configs[FLEET_CONFIG_KEY])
        self._permits = ReplicaPermits(identity.replica_id, time.monotonic())
        self._page: StatusPage | None = None
        self._probe = ReplicaProbe(identity, revision(), self._permits, stop_flag())
        client = ControllerClient(options.controller_app, caller=f"replica {identity.replica_id}")
        # The loop keeps only weak references to tasks.
        self._reports = asyncio.create_task(
            report_forever(client, self._probe.read, self._permits, self._obey, options.report)
        )
        # Ray makes the engine's configuration in another process, where vLLM's plugin sees it.
        hook_front()
        skip_fetching(self._llm_config)
        await super().start()
        engine = engine_client(self)
        await warm_up(engine)
        engine_options = parse_options(engine.vllm_config.additional_config)
        self._pins = PinKeeper(engine_options.pin, self._push_pin)
        if engine_options.key is not None:
            self._page = StatusPage.attach(engine_options.key)
        gate = EngineGate(
            self._mode,
            lambda: self._permits.admission,
            priorities=engine.vllm_config.scheduler_config.policy == "priority",
        )
        gate.guard(self.engine, engine)
        self._hangs = HangWatch(
            lambda: engine.collective_rpc("check_health"),
            self._steps,
            options.report.hung_after_s,
        )
        self._ranks = RankWatch.of_this_replica()
        self._probe.engine_started(
            engine_is_dead=lambda: bool(engine.errored) or self._has_lost_a_rank(),
            read_status=self._read_page if self._page is not None else None,
            has_work=engine.output_processor.has_unfinished_requests,
        )

    async def check_health(self) -> None:
        """Raise when the engine is dead or cannot be reported, so that Serve replaces the replica.

        Raises
        ------
        RuntimeError
            With the first known cause. It stays: a dead engine does not recover.
        """
        if self._reports.done():
            self._probe.latch_death(f"its reports have stopped: {self._reports.exception()!r}")
        self._probe.read()
        if self._probe.cause_of_death is None:
            try:
                await super().check_health()
            except Exception as error:
                self._probe.latch_death(f"{type(error).__name__}: {error}")
        if self._probe.cause_of_death is None:
            hang = self._hangs.look()
            if hang is not None:
                self._probe.latch_death(hang)
                kill_engine()
        if self._probe.cause_of_death is not None:
            raise RuntimeError(f"engine is dead: {self._probe.cause_of_death}")

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers fall back to when pushes stop."""
        return {**await super().record_routing_stats(), **to_stats(self._probe.read())}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler hands to a policy of ``dps_autoscaling``."""
        return to_stats_for_scaling(self._probe.read())

    def _has_lost_a_rank(self) -> bool:
        lost = self._ranks.one_has_ended()
        if lost:
            # Its requests go elsewhere once the engine is dead, which takes vLLM seconds.
            kill_engine()
        return lost

    def _read_page(self) -> EngineStatus | None:
        assert self._page is not None, "the engine is elastic"
        try:
            return self._page.read()
        except RuntimeError:
            # Its writer has ended or was stopped amid a step: it hangs as well.
            kill_engine()
            raise

    def _steps(self) -> int | None:
        """Publications so far: one when modes, units, requests, a pin or a fault change, else one
        for every 20 ms of stepping."""
        status = self._page.read() if self._page is not None else None
        return status.sequence if status is not None else None

    def _mode(self) -> Mode | None:
        status = self._page.read() if self._page is not None else None
        return status.mode if status is not None else None

    def _obey(self) -> None:
        """Hand the fleet's permits to the engine."""
        if self._page is not None:
            now_s = time.monotonic()
            self._page.set_permits(
                restore_until_s=self._permits.restore_until_s(now_s),
                fast=self._permits.may_go_fast(now_s),
                stop_restores=self._permits.must_stop_restores(now_s),
            )
            if self._probe.cause_of_death is None:
                self._pins.keep(self._permits.pin)

    async def _push_pin(self, pin: Pin) -> None:
        await engine_client(self).collective_rpc("dps_set_pin", args=(pin.value,))
