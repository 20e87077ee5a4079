"""What every worker of an elastic engine does, whatever device its rank computes on."""

import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tp_group

from dps_ray.config import DpsConfigError
from dps_ray.engine import rank as ranks
from dps_ray.engine.configure import engine_options
from dps_ray.engine.kv_views import bytes_per_block
from dps_ray.engine.preflight import no_eligible_layer
from dps_ray.engine.ranks_agree import least_of_ranks
from dps_ray.engine.refusals import SPLIT_AT_LOAD
from dps_ray.engine.seams import swapped
from dps_ray.memory.geometry import plan_geometry
from dps_ray.modes import Pin

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    # The mixin stands before a worker in the method resolution order.
    _Worker = object

logger = logging.getLogger("vllm.dps")


class ElasticWorker(_Worker):
    """Mixin over vLLM's workers: splits weights at load, lends their residual, brings it back."""

    def _runner_seam(self) -> tuple[ModuleType, str, type]:
        """Where the stock worker takes its runner class from, and the class to find there."""
        raise NotImplementedError

    def init_device(self) -> None:
        with swapped(*self._runner_seam()):
            super().init_device()
        ranks.begin(engine_options(self.vllm_config), self.rank, self.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        rank = ranks.current()
        if not rank.arena.used_bytes:
            logger.error("dps rank %d: load report\n%s", rank.index, rank.report.table())
            raise no_eligible_layer(self.model_config.model, rank.options.formats)
        logger.info("dps rank %d: load report\n%s", rank.index, rank.report.table())

    def reload_weights(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuse, before vLLM has taken the layers apart.

        Raises
        ------
        DpsConfigError
            Always: the residual's bytes have a fixed place, and backups, once the KV cache stands.
        """
        raise DpsConfigError(
            f"reload_weights: {SPLIT_AT_LOAD}; start a replica of the new checkpoint instead. "
            "This engine goes on as it was"
        )

    def determine_available_memory(self) -> int:
        rank = ranks.current()
        base_bytes = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is None:
            # vLLM saw only the upper bytes: the residual is yet to take its share.
            base_bytes -= rank.arena.used_bytes
        base_bytes = least_of_ranks(base_bytes, get_tp_group().cpu_group)
        block_bytes = bytes_per_block(self.vllm_config, self.model_runner.get_kv_cache_spec())
        geometry = plan_geometry(
            kv_bytes=base_bytes,
            residual_bytes=rank.arena.used_bytes,
            block_bytes=block_bytes,
            granularity_bytes=rank.arena.driver.granularity_bytes,
            unit_bytes=rank.options.unit_bytes,
            lend=rank.options.lend,
        )
        self.model_runner.dps_geometry = geometry
        return geometry.num_blocks * block_bytes

    def shutdown(self) -> None:
        ranks.end()
        super().shutdown()

    def dps_verify(self) -> dict[str, Any]:
        """State of this rank for checks: does every backed segment equal its backup?"""
        return ranks.current().verify()

    def dps_set_pin(self, pin: str) -> None:
        """Pin the replica's mode while it runs: ``auto``, ``full`` or ``fast``.

        For ``collective_rpc("dps_set_pin", args=("fast",))``, which also wakes an idle engine.
        """
        if pin not in tuple(Pin):
            raise DpsConfigError(f"pin is {pin!r}: give one of {', '.join(Pin)}")
        ranks.current().set_pin(Pin(pin))

    def dps_load_report(self) -> dict[str, Any]:
        """Formats and bytes of every layer of this rank."""
        return ranks.current().report.as_dict()
