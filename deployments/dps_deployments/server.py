"""One replica: Ray's LLM server, plus the fleet's eyes on its engine."""

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray.serve.llm import LLMServer

from dps_deployments.controller_client import ControllerClient
from dps_deployments.hints import to_stats
from dps_deployments.probe import ReplicaProbe
from dps_deployments.ray_adapter import engine_client, replica_identity
from dps_deployments.reporter import report_forever
from dps_ray.config import parse_options
from dps_ray.engine.status_page import StatusPage
from dps_ray.fleet.reporting import ReportOptions
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
        self._probe = ReplicaProbe(identity, code_version=version("dps-ray"))
        client = ControllerClient(options.controller_app, caller=f"replica {identity.replica_id}")
        # The loop keeps only weak references to tasks.
        self._reports = asyncio.create_task(
            report_forever(client, self._probe.read, options.report)
        )
        await super().start()
        engine = engine_client(self)
        self._probe.engine_started(
            engine_is_dead=lambda: bool(engine.errored),
            read_status=_status_reader(engine.vllm_config.additional_config),
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
        if self._probe.cause_of_death is not None:
            raise RuntimeError(f"engine is dead: {self._probe.cause_of_death}")

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers fall back to when pushes stop."""
        return {**await super().record_routing_stats(), **to_stats(self._probe.read())}


def _status_reader(additional_config: Any) -> Callable[[], EngineStatus | None] | None:
    """Reader of the engine's status page; ``None`` when the engine has none."""
    key = parse_options(additional_config).key
    return StatusPage.attach(key).read if key is not None else None
