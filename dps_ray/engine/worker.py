"""vLLM's CPU worker and model runner on semi-unified memory."""

import time
from types import ModuleType
from typing import Any

import torch
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.config import CompilationMode
from vllm.v1.kv_cache_layout import KVCacheLayout

from dps_ray.engine import rank as ranks
from dps_ray.engine.block_tables import redirect
from dps_ray.engine.elastic_worker import ElasticWorker
from dps_ray.engine.kv_views import RegionKvCache
from dps_ray.engine.mla import honour_strides
from dps_ray.engine.moe_runner import shorten_runners

NOTE_PERIOD_S = 0.02
"""While nothing is restored, steps that follow each other faster teach the pacing nothing new, and
telling it of each would take a small model's step a hundredth of its time."""


class DpsCpuModelRunner(RegionKvCache, cpu_worker.CPUModelRunner):
    """Model runner whose KV cache lies in the shared region."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample without the generators of requests whose prompt is not complete yet.

        What is drawn for those is thrown away. vLLM turns their generators back afterwards, which
        a generator of a CPU cannot do: it would end the engine.
        """
        generators = self.input_batch.generators
        if not generators:
            return super().sample_tokens(grammar_output)
        unfinished = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
        kept = {
            index: generators.pop(index) for index in map(int, unfinished) if index in generators
        }
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(kept)


class DpsCpuWorker(ElasticWorker, cpu_worker.CPUWorker):
    """Elastic CPU worker."""

    _note_from_s = 0.0

    def _runner_seam(self) -> tuple[ModuleType, str, type]:
        return cpu_worker, "CPUModelRunner", DpsCpuModelRunner

    def init_device(self) -> None:
        honour_strides()
        super().init_device()
        if torch.cpu._is_amx_tile_supported():
            # vLLM's attention uses the tile registers, but leaves it to the GEMM libraries to ask
            # the operating system for them; with fused kernels none of those may ever be called.
            torch.cpu._init_amx()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.vllm_config.compilation_config.mode == CompilationMode.NONE:
            shorten_runners(self.model_runner.model)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Block-outermost: a physical unit is then a run of whole blocks for all layers.

        The CPU attention kernels take every stride from the tensors, though they declare only
        their default layout.
        """
        return [KVCacheLayout.BLHNC.name]

    def execute_model(self, scheduler_output: Any) -> Any:
        rank = ranks.current()
        rank.apply(scheduler_output.dps)
        redirect(self.model_runner, scheduler_output.dps.move)
        tokens = scheduler_output.total_num_scheduled_tokens
        if not tokens:
            rank.count_idle_step()
            self._note_from_s = 0.0
            return super().execute_model(scheduler_output)
        began_s = time.monotonic()
        if began_s < self._note_from_s and not rank.restoring:
            rank.count_pass(rank.full_share)
            return super().execute_model(scheduler_output)
        self._note_from_s = began_s + NOTE_PERIOD_S
        copied_before = rank.begin_step()
        output = super().execute_model(scheduler_output)
        rank.count_step(time.monotonic() - began_s, tokens, rank.full_share, copied_before)
        return output
