"""vLLM's V1 GPU model runner with one set of CUDA graphs for each mode.

All private names of that runner that this project relies on stand here. A batch descriptor is the
key of every graph, full and piecewise: with the mode in it, the dispatcher offers each graph twice
and the graph wrappers keep the two apart.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dps_ray.engine import rank as ranks
from dps_ray.engine.configure import engine_options
from dps_ray.engine.graph_book import Capture, GraphBook
from dps_ray.engine.kv_views import RegionKvCache
from dps_ray.engine.seams import captures_beside_restores
from dps_ray.engine.vllm_version import require_supported_vllm
from dps_ray.modes import Mode

require_supported_vllm()


@dataclass(frozen=True)
class ModeBatchDescriptor(BatchDescriptor):
    """A padded batch and the mode it runs in."""

    mode: Mode = Mode.FULL


def with_mode(descriptor: BatchDescriptor, mode: Mode) -> ModeBatchDescriptor:
    """The same batch in a mode."""
    shape = {field.name: getattr(descriptor, field.name) for field in fields(BatchDescriptor)}
    return ModeBatchDescriptor(**shape, mode=mode)


class ModeDispatcher(CudagraphDispatcher):
    """Dispatcher whose keys exist in both modes, and that dispatches in the mode of the step."""

    def __init__(self, vllm_config: VllmConfig, capture: Capture) -> None:
        super().__init__(vllm_config)
        self.book = GraphBook[tuple[CUDAGraphMode, BatchDescriptor]](capture)
        self._key_mode: Mode | None = None

    def initialize_cudagraph_keys(
        self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1
    ) -> None:
        self.book.clear()
        for mode in Mode:
            with self._keys_of(mode):
                super().initialize_cudagraph_keys(cudagraph_mode, uniform_decode_query_len)

    def dispatch(
        self, num_tokens: int, *args: Any, **kwargs: Any
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        graph = super().dispatch(num_tokens, *args, **kwargs)
        if graph[0] is CUDAGraphMode.NONE or self.book.has(graph):
            return graph
        return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Largest batches first, each in both modes.

        The stock order within a size is that of a set, which differs between processes.
        """
        order = list(Mode)
        return [
            (runtime_mode, sorted(keys, key=lambda key: (*_size(key), order.index(key.mode))))
            for runtime_mode, keys in super().get_capture_descs()
        ]

    def _create_padded_batch_descriptor(self, *args: Any, **kwargs: Any) -> ModeBatchDescriptor:
        mode = self._key_mode or ranks.current().graph_mode
        return with_mode(super()._create_padded_batch_descriptor(*args, **kwargs), mode)

    @contextmanager
    def _keys_of(self, mode: Mode) -> Iterator[None]:
        self._key_mode = mode
        try:
            yield
        finally:
            self._key_mode = None


def _size(key: BatchDescriptor) -> tuple[int, ...]:
    return -key.num_tokens, -key.num_active_loras, -(key.num_reqs or 0), -key.uniform


class DpsGpuModelRunnerV1(RegionKvCache, GPUModelRunner):
    """Runner whose KV cache lies in the shared region and whose graphs know their mode."""

    cudagraph_dispatcher: ModeDispatcher

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.cudagraph_dispatcher = ModeDispatcher(vllm_config, engine_options(vllm_config).graphs)

    def capture_missed(self) -> None:
        """Capture the graphs that earlier steps have missed; between two steps only."""
        missed = self.cudagraph_dispatcher.book.missed()
        if not missed:
            return
        set_cudagraph_capturing_enabled(True)
        try:
            with (
                captures_beside_restores(),
                self._freeze_gc(),
                graph_capture(device=self.device),
            ):
                for runtime_mode, descriptor in missed:
                    self._warmup_and_capture(descriptor, cudagraph_runtime_mode=runtime_mode)
        finally:
            set_cudagraph_capturing_enabled(False)

    def _capture_cudagraphs(
        self, batch_descriptors: list[ModeBatchDescriptor], *args: Any, **kwargs: Any
    ) -> None:
        book, start = self.cudagraph_dispatcher.book, ranks.current().mode
        due = [key for key in batch_descriptors if book.due_at_start(key.mode is start)]
        super()._capture_cudagraphs(due, *args, **kwargs)

    def _warmup_and_capture(
        self,
        desc: ModeBatchDescriptor,
        cudagraph_runtime_mode: CUDAGraphMode,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.cudagraph_dispatcher.book.add((cudagraph_runtime_mode, desc))
        with ranks.current().capturing(desc.mode):
            super()._warmup_and_capture(desc, cudagraph_runtime_mode, *args, **kwargs)
