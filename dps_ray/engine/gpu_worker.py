"""vLLM's GPU worker on semi-unified memory, over either of its model runners."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import vllm.v1.worker.gpu_worker as stock_worker
from vllm.v1.kv_cache_layout import KVCacheLayout

from dps_ray.config import DpsConfigError
from dps_ray.engine import rank as ranks
from dps_ray.engine.block_tables import redirect
from dps_ray.engine.elastic_worker import ElasticWorker
from dps_ray.engine.refusals import captures_graphs
from dps_ray.modes import Mode


class DpsGpuWorker(ElasticWorker, stock_worker.Worker):
    """Elastic GPU worker."""

    def init_device(self) -> None:
        super().init_device()
        ranks.current().captures_graphs = captures_graphs(self.vllm_config)
        self._timer = StepTimer()

    def _runner_seam(self) -> tuple[ModuleType, str, type]:
        if self.use_v2_model_runner:
            import vllm.v1.worker.gpu.model_runner as runner_v2

            from dps_ray.engine.gpu_runner_v2 import DpsGpuModelRunnerV2

            return runner_v2, "GPUModelRunner", DpsGpuModelRunnerV2
        import vllm.v1.worker.gpu_model_runner as runner_v1

        from dps_ray.engine.gpu_runner_v1 import DpsGpuModelRunnerV1

        return runner_v1, "GPUModelRunner", DpsGpuModelRunnerV1

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Block-outermost ones: a physical unit is then a run of whole blocks for all layers.

        Raises
        ------
        DpsConfigError
            When the attention backend supports none.
        """
        supported = super().get_supported_kv_cache_layouts()
        usable = [name for name in supported if KVCacheLayout[name].is_block_outermost]
        if not usable:
            raise DpsConfigError(
                f"the attention backend supports the KV cache layouts {supported}: quantization "
                "'dps' needs one whose outermost dimension is the block; choose another "
                "attention_backend, for example FLASH_ATTN"
            )
        return usable

    def shutdown(self) -> None:
        # Memory must not be unmapped under a kernel that still runs.
        torch.accelerator.synchronize()
        super().shutdown()

    @torch.inference_mode()
    def compile_or_warm_up_model(self) -> Any:
        """Compile the kernels of both modes: no first step of a burst waits for a compiler."""
        counts = self._warm_up_tokens()
        for mode in Mode:
            with ranks.current().capturing(mode):
                for tokens in counts:
                    self.model_runner._dummy_run(tokens, is_profile=True)
        return super().compile_or_warm_up_model()

    def _warm_up_tokens(self) -> list[int]:
        """Batches after which no other one compiles a kernel; none where none of them runs."""
        rank = ranks.current()
        if not rank.fused:
            return []
        from dps_kernels.hopper import arch, warm_up  # needs triton

        from dps_ray.engine.moe_cuda import mixtures_of

        largest = self.vllm_config.scheduler_config.max_num_batched_tokens
        mixtures = mixtures_of(self.get_model())
        return warm_up.token_counts(largest, arch.of_device(rank.device), mixtures)

    def execute_model(self, scheduler_output: Any) -> Any:
        rank = ranks.current()
        command = getattr(scheduler_output, "dps", None)
        if command is None:
            return super().execute_model(scheduler_output)  # vLLM's own warm-up
        # Before anything of this step is launched: the command's fence is everything launched.
        rank.apply(command)
        redirect(self.model_runner, command.move)
        for done in self._timer.finished():
            rank.count_step(*done)
        tokens = scheduler_output.total_num_scheduled_tokens
        if not tokens:
            if not self._timer.running:
                rank.count_idle_step()
            return super().execute_model(scheduler_output)
        self.model_runner.capture_missed()
        with self._timer.step(tokens, rank.full_share, rank.begin_step()):
            return super().execute_model(scheduler_output)


StepFacts = tuple[int, float, int]
"""What is known of a pass when it is launched: its tokens, its share of full layers, and the
residual bytes copied before it."""


class StepTimer:
    """Durations of forward passes that run after the call which launched them has returned."""

    def __init__(self) -> None:
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event, StepFacts]] = deque()

    @contextmanager
    def step(self, *facts: *StepFacts) -> Iterator[None]:
        """Time what is launched inside the context on the current stream."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._running.append((start, end, facts))

    @property
    def running(self) -> int:
        """Passes that had not ended when ``finished`` was last asked."""
        return len(self._running)

    def finished(self) -> list[tuple[float, *StepFacts]]:
        """Seconds and facts of the passes that have ended since the last call, oldest first."""
        ended = []
        while self._running and self._running[0][1].query():
            start, end, facts = self._running.popleft()
            ended.append((start.elapsed_time(end) / 1e3, *facts))
        return ended
