"""vLLM's CPU worker and model runner on semi-unified memory."""

import logging
import time
from typing import Any

import torch
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import bind_kv_cache

from dps_ray.config import DpsConfigError
from dps_ray.engine import rank as ranks
from dps_ray.engine.block_tables import redirect
from dps_ray.engine.configure import engine_options
from dps_ray.engine.kv_views import bytes_per_block, layer_views
from dps_ray.engine.mla import honour_strides
from dps_ray.engine.preflight import no_eligible_layer
from dps_ray.memory.geometry import Geometry, plan_geometry
from dps_ray.modes import Pin

logger = logging.getLogger("vllm.dps")


class DpsCpuModelRunner(cpu_worker.CPUModelRunner):
    """Model runner whose KV cache lies in the shared region."""

    dps_geometry: Geometry
    """Set by the worker once the residual's size is known."""

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int], *_: Any, **__: Any
    ) -> dict[str, torch.Tensor]:
        geometry = self.dps_geometry
        if kv_cache_config.num_blocks != geometry.num_blocks:
            raise DpsConfigError(
                f"vLLM planned {kv_cache_config.num_blocks} KV blocks, rank memory holds "
                f"{geometry.num_blocks}: size the KV cache with kv_cache_memory_bytes only"
            )
        views = layer_views(
            ranks.current().build_region(geometry),
            geometry.block_stride_bytes,
            kv_cache_config,
            self.cache_config.get_resolved_kv_cache_layout(),
            kernel_block_sizes,
        )
        bind_kv_cache(views, self.compilation_config.static_forward_context, self.kv_caches, 1)
        return views


class DpsCpuWorker(cpu_worker.CPUWorker):
    """CPU worker that splits weights at load, lends their residual and brings it back."""

    def init_device(self) -> None:
        ranks.begin(engine_options(self.vllm_config), self.rank)
        honour_strides()
        stock = cpu_worker.CPUModelRunner
        # The stock worker names its runner class in its module; there is no other seam.
        cpu_worker.CPUModelRunner = DpsCpuModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        rank = ranks.current()
        if not rank.arena.used_bytes:
            logger.error("dps rank %d: load report\n%s", rank.index, rank.report.table())
            raise no_eligible_layer(self.model_config.model, rank.options.formats)
        logger.info("dps rank %d: load report\n%s", rank.index, rank.report.table())

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Block-outermost: a physical unit is then a run of whole blocks for all layers.

        The CPU attention kernels take every stride from the tensors, though they declare only
        their default layout.
        """
        return [KVCacheLayout.BLHNC.name]

    def determine_available_memory(self) -> int:
        rank = ranks.current()
        block_bytes = bytes_per_block(self.vllm_config, self.model_runner.get_kv_cache_spec())
        geometry = plan_geometry(
            kv_bytes=super().determine_available_memory(),
            residual_bytes=rank.arena.used_bytes,
            block_bytes=block_bytes,
            granularity_bytes=rank.arena.driver.granularity_bytes,
            unit_bytes=rank.options.unit_bytes,
            lend=rank.options.lend,
        )
        self.model_runner.dps_geometry = geometry
        return geometry.num_blocks * block_bytes

    def execute_model(self, scheduler_output: Any) -> Any:
        rank = ranks.current()
        rank.apply(scheduler_output.dps)
        redirect(self.model_runner, scheduler_output.dps.move)
        tokens = scheduler_output.total_num_scheduled_tokens
        if not tokens:
            return super().execute_model(scheduler_output)
        began_s = time.monotonic()
        output = super().execute_model(scheduler_output)
        rank.count_step(time.monotonic() - began_s, tokens)
        return output

    def shutdown(self) -> None:
        ranks.current().close()
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
