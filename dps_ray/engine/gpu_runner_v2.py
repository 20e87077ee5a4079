"""vLLM's V2 GPU model runner with one set of CUDA graphs for each mode.

All private names of that runner that this project relies on stand here. Its graph manager keeps
full graphs by an execution descriptor and leaves piecewise ones to wrappers that look at the batch
descriptor of the forward context: both get the mode.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import vllm.v1.worker.gpu.model_runner as stock_runner
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.utils import bind_kv_cache

from dps_ray.engine import rank as ranks
from dps_ray.engine.configure import engine_options
from dps_ray.engine.gpu_runner_v1 import with_mode
from dps_ray.engine.graph_book import GraphBook
from dps_ray.engine.kv_views import region_views
from dps_ray.engine.seams import captures_beside_restores, swapped
from dps_ray.engine.vllm_version import require_supported_vllm
from dps_ray.memory.geometry import Geometry
from dps_ray.modes import Mode

require_supported_vllm()

ForwardFactory = Callable[..., Callable[[CUDAGraphMode], None]]


@dataclass(frozen=True)
class ModeExecutionDescriptor(BatchExecutionDescriptor):
    """A batch shape, how it runs, and the mode it runs in."""

    mode: Mode = Mode.FULL


def _in_mode(descriptor: BatchExecutionDescriptor, mode: Mode) -> ModeExecutionDescriptor:
    shape = {
        field.name: getattr(descriptor, field.name) for field in fields(BatchExecutionDescriptor)
    }
    return ModeExecutionDescriptor(**shape, mode=mode)


class _ModeGraphs(CudaGraphManager):
    """Manager whose graphs exist in both modes, and that dispatches in the mode of the step.

    It stands below ``ModelCudaGraphManager`` in the method resolution order, whose ``capture``
    hands the recipe of a forward pass down to this one.
    """

    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    _candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]]
    _candidates_of: dict[Mode, dict[tuple[int, int], list[BatchExecutionDescriptor]]]

    def _init_candidates(self) -> None:
        super()._init_candidates()
        self.book = GraphBook[BatchExecutionDescriptor](engine_options(self.vllm_config).graphs)
        self._candidates_of = {
            mode: {
                key: [_in_mode(shape, mode) for shape in shapes]
                for key, shapes in self._candidates.items()
            }
            for mode in Mode
        }
        # Largest batches first, each in both modes.
        self._capture_descs = {
            runtime_mode: [_in_mode(shape, mode) for shape in shapes for mode in Mode]
            for runtime_mode, shapes in self._capture_descs.items()
        }

    def choose_for_start(self) -> None:
        """Leave to capture what the book says is due at start."""
        start = ranks.current().mode
        self._capture_only(lambda shape: self.book.due_at_start(shape.mode is start))

    def choose_missed(self) -> bool:
        """Leave to capture the graphs that steps have missed; whether there are any."""
        missed = self.book.missed()
        self._capture_descs = {
            runtime_mode: [shape for shape in missed if shape.cg_mode is runtime_mode]
            for runtime_mode in {shape.cg_mode for shape in missed}
        }
        return bool(missed)

    def capture(self, create_forward_fn: ForwardFactory, *args: Any, **kwargs: Any) -> None:
        rank = ranks.current()

        def create(desc: ModeExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            self.book.add(desc)
            with rank.capturing(desc.mode):
                forward = create_forward_fn(desc, warmup=warmup)

            def run(runtime_mode: CUDAGraphMode) -> None:
                with rank.capturing(desc.mode):
                    forward(runtime_mode)

            return run

        super().capture(create, *args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        self._candidates = self._candidates_of[ranks.current().graph_mode]
        shape = super().dispatch(*args, **kwargs)
        if shape.cg_mode is CUDAGraphMode.NONE or self.book.has(shape):
            return shape
        num_reqs, num_tokens = args[:2]
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_active_loras=shape.num_active_loras,
        )

    def run_pw_graph(self, model: torch.nn.Module, model_inputs: dict[str, Any]) -> Any:
        context = get_forward_context()
        assert context.batch_descriptor is not None, "piecewise graphs are named by it"
        context.batch_descriptor = with_mode(context.batch_descriptor, ranks.current().graph_mode)
        return super().run_pw_graph(model, model_inputs)

    def _capture_only(self, due: Callable[[Any], bool]) -> None:
        self._capture_descs = {
            runtime_mode: [shape for shape in shapes if due(shape)]
            for runtime_mode, shapes in self._capture_descs.items()
        }


class DpsGraphManager(ModelCudaGraphManager, _ModeGraphs):
    """Graphs of the model's forward pass, in both modes."""


class DpsGpuModelRunnerV2(stock_runner.GPUModelRunner):
    """Runner whose KV cache lies in the shared region and whose graphs know their mode."""

    dps_geometry: Geometry | None = None
    """Set by the worker once the residual's size is known; ``None`` while memory is profiled."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        with swapped(stock_runner, "ModelCudaGraphManager", DpsGraphManager):
            if self.dps_geometry is None:
                super().initialize_kv_cache(*args, **kwargs)
                return
            with swapped(stock_runner, "init_kv_cache", self._init_kv_cache):
                super().initialize_kv_cache(*args, **kwargs)
        self.cudagraph_manager.choose_for_start()

    def capture_missed(self) -> None:
        """Capture the graphs that earlier steps have missed; between two steps only."""
        if self.cudagraph_manager.choose_missed():
            with captures_beside_restores():
                self.capture_model()

    def _init_kv_cache(
        self,
        runner_kv_caches: list[torch.Tensor],
        forward_context: dict[str, Any],
        kv_cache_config: KVCacheConfig,
        device: torch.device,
        kernel_block_sizes: list[int],
        vllm_config: Any,
        kv_cache_allocation_context: Any = None,
    ) -> dict[str, torch.Tensor]:
        assert self.dps_geometry is not None
        views = region_views(
            self.dps_geometry,
            kv_cache_config,
            vllm_config.cache_config.get_resolved_kv_cache_layout(),
            kernel_block_sizes,
            get_shared_kv_cache_layers(vllm_config),
        )
        bind_kv_cache(views, forward_context, runner_kv_caches, 1)
        return views
