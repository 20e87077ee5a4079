"""State of one rank: its split weights, its memory and the mode of the running step.

A worker process serves one rank, so there is one ``Rank`` a process. Layers reach it through
``current()``; nothing else is global.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dps_kernels
import torch

from dps_ray.commands import StepCommand
from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.engine.preflight import require_few_layers, require_few_units
from dps_ray.engine.rank_section import RankSection
from dps_ray.engine.restore_reporter import RestoreReporter
from dps_ray.engine.status_page import StatusPage
from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.driver import VmmError
from dps_ray.memory.drivers import open_driver
from dps_ray.memory.geometry import Geometry
from dps_ray.memory.layers import LayerResidual, layers_of
from dps_ray.memory.manager import MemoryManager
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.region import ResidualMismatchError, SharedRegion
from dps_ray.modes import Mode, Pin
from dps_ray.precision.report import LoadReport

logger = logging.getLogger("vllm.dps")

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Routes tokens and runs their experts: hidden states and router logits to hidden states."""

# Address space only: reserving it costs nothing, and the residual's size is not known before
# the last layer is loaded.
RESIDUAL_RESERVATION_BYTES = 1 << 40


class Rank:
    """One rank of an elastic engine, from the first loaded layer to shutdown."""

    def __init__(self, options: DpsOptions, index: int, device: torch.device) -> None:
        if options.key is None:
            raise DpsConfigError("additional_config.dps.key is missing: the engine sets it")
        self.options = options
        self.index = index
        self.device = device
        self.report = LoadReport()
        self.arena = ResidualArena(
            open_driver("cuda" if device.type == "cuda" else "host", device.index or 0),
            RESIDUAL_RESERVATION_BYTES,
            backup_budget_bytes=options.backup_budget_bytes,
        )
        self.access = dps_kernels.new_access(device.type)
        """Which residual weights the running step may read."""
        self.mode = Mode.FAST  # until the region stands: the residual has no memory before
        self._capture_mode: Mode | None = None
        self._full_layers: tuple[int, ...] = ()
        self.memory: MemoryManager | None = None
        self._page = StatusPage.join(options.key)
        self._section: RankSection = self._page.rank(index)
        self._layers: tuple[LayerResidual, ...] = ()
        """Those that return one by one; none where all return at once."""
        self._scratch: dict[tuple[torch.dtype, str], torch.Tensor] = {}
        self.fused = _resolve_kernel(options.kernel, device)
        self.captures_graphs = False
        """Whether forward passes are captured: then every layer must run in the kernels."""
        self.experts: dict[str, Experts] = {}
        """Split experts by the name of their layer; ``torch.ops.vllm.dps_experts`` calls them."""

    def build_region(self, geometry: Geometry) -> torch.Tensor:
        """Back the residual and the KV cache with memory; full mode is possible from here on.

        Returns
        -------
        torch.Tensor
            The KV cache's bytes, ``[num_blocks * block_stride_bytes]`` uint8, zeroed.
        """
        require_few_units(geometry)
        if self.options.return_by == "layer":
            self._layers = layers_of(self.arena.entries)
            require_few_layers(len(self._layers))
        try:
            region = SharedRegion(self.arena.driver, self.arena, geometry, self.options.binding)
        except VmmError as error:
            raise DpsConfigError(
                f"rank {self.index} cannot have {geometry.total_bytes} bytes for residual and KV "
                f"cache ({error}): lower kv_cache_memory_bytes or gpu_memory_utilization"
            ) from error
        try:
            region.upload_all()
        except Exception:
            region.close()
            raise
        self.memory = MemoryManager(
            region,
            pacer=Pacer(
                max_inflation=self.options.restore_max_inflation,
                floor_bytes_per_s=self.options.restore_floor_bytes_per_s,
                cap_bytes_per_s=self.options.restore_cap_bytes_per_s,
            ),
            chunk_bytes=self.options.restore_chunk_bytes,
            verify=self.options.verify_restore,
            on_done=RestoreReporter(self.index, self._section),
        )
        self.mode = Mode.FAST if self.options.pin is Pin.FAST else Mode.FULL
        section = self._section
        section["base_blocks"] = geometry.base_blocks
        section["elastic_blocks"] = geometry.elastic_blocks
        section["blocks_per_unit"] = geometry.blocks_per_unit
        section["units"] = geometry.num_units
        section["unit_bytes"] = geometry.unit_bytes
        section.layer_bounds = [(layer.start, layer.end) for layer in self._layers]
        section["backup_bytes"] = self.arena.backup.nbytes
        logger.info(
            "dps rank %d: %d base + %d elastic KV blocks, %d units of %.2f MiB, residual %.1f MiB, "
            "its backup %.1f MiB (bytes by NUMA node: %s)",
            self.index, geometry.base_blocks, geometry.elastic_blocks, geometry.num_units,
            geometry.unit_bytes / 2**20, self.arena.used_bytes / 2**20,
            self.arena.backup.nbytes / 2**20, self.arena.backup.bytes_by_node or "unknown",
        )  # fmt: skip
        return region.kv_tensor

    def apply(self, command: StepCommand) -> None:
        """Obey the scheduler's orders for the step about to run."""
        assert self.memory is not None, "a step was scheduled before the region stood"
        # Taken before this step is launched: every earlier step lies before the mark.
        self.memory.apply(command, self.arena.driver.compute.mark())
        self.mode = command.mode
        self._run_full(command.full_layers)

    @property
    def mode(self) -> Mode:
        """Of the running step."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = mode
        self.access.all = mode is Mode.FULL

    @property
    def full_share(self) -> float:
        """Share of the layers that the running step runs in full precision; 1 in full mode."""
        if self.mode is Mode.FULL:
            return 1.0
        return len(self._full_layers) / len(self._layers) if self._layers else 0.0

    @property
    def restoring(self) -> bool:
        """Whether a restore is queued or running, those of all commands so far included."""
        assert self.memory is not None
        return not self.memory.at_rest

    def begin_step(self) -> int:
        """Announce a forward pass to the restore's pacing; the residual bytes copied so far."""
        assert self.memory is not None
        return self.memory.begin_step()

    def count_step(
        self, duration_s: float, tokens: int, full_share: float, copied_before: int
    ) -> None:
        """Feed a finished forward pass to the restore's pacing and to the counters."""
        assert self.memory is not None
        self.memory.note_step(duration_s, tokens, full_share, copied_before=copied_before)
        self.count_pass(full_share)

    def count_pass(self, full_share: float) -> None:
        """Count a forward pass without telling the restore's pacing."""
        self._section["fast_steps" if full_share < 1.0 else "full_steps"] += 1

    def count_idle_step(self) -> None:
        """Tell the restore's pacing that nothing is computed: it may have the whole link."""
        assert self.memory is not None
        self.memory.note_step(0.0, 0, copied_before=0)

    @property
    def graph_mode(self) -> Mode:
        """Mode of the CUDA graphs to run or capture."""
        return self._capture_mode or self.mode

    @contextmanager
    def capturing(self, mode: Mode) -> Iterator[None]:
        """Warm up and capture graphs of ``mode``.

        While memory is being profiled the layers stay fast in both modes, as the residual has no
        memory yet. The graphs then measured are as large: kernels differ, activations do not.
        """
        stepping, full_layers = self.mode, self._full_layers
        self._run_full(())
        self._capture_mode = mode
        if self.memory is not None:
            self.mode = mode
        try:
            yield
        finally:
            self.mode, self._capture_mode = stepping, None
            self._run_full(full_layers)

    def scratch(self, shape: torch.Size, dtype: torch.dtype, slot: str = "") -> torch.Tensor:
        """A reusable buffer for rebuilt weights, one a slot, as large as the largest asked for."""
        numel = shape.numel()
        buffer = self._scratch.get((dtype, slot))
        if buffer is None or buffer.numel() < numel:
            buffer = self._scratch[dtype, slot] = torch.empty(
                numel, dtype=dtype, device=self.device
            )
        return buffer[:numel].view(shape)

    def set_pin(self, pin: Pin) -> None:
        """Hand the operator's pin to the scheduler, which obeys it at its next step."""
        self._page.set_pin(pin)

    def verify(self) -> dict[str, Any]:
        """Figures for checks; ``residual_intact`` says whether the residual equals its backup."""
        assert self.memory is not None
        return {
            "rank": self.index,
            "mode": str(self.mode),
            "residual_intact": self._residual_intact(),
            "residual_bytes": self.arena.used_bytes,
            "fast_steps": int(self._section["fast_steps"]),
            "full_steps": int(self._section["full_steps"]),
            "restored_bytes": int(self._section["restored_bytes"]),
            "restores_failed": int(self._section["restores_failed"]),
        }

    def close(self) -> None:
        """Stop restoring and give the memory back: no layer may read its residual any more."""
        self.mode = Mode.FAST
        self._run_full(())
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        # The region closes the arena with it; a rank that never built one still holds the range.
        self.arena.close()
        self.arena.driver.close()

    def _run_full(self, layers: tuple[int, ...]) -> None:
        """Let these layers, and no others, read their residual in a fast step."""
        if layers != self._full_layers:
            self._full_layers = layers
            self.access.addresses = {
                self.arena.address + offset
                for layer in layers
                for offset in self._layers[layer].offsets
            }

    def _residual_intact(self) -> bool:
        assert self.memory is not None
        try:
            self.memory.verify_all()
        except ResidualMismatchError as error:
            logger.error("dps rank %d: %s", self.index, error)
            return False
        return True


def _resolve_kernel(choice: str, device: torch.device) -> bool:
    """Whether weights are decoded inside the GEMM."""
    if device.type == "cuda":
        return choice != "exact"  # Triton compiles where vLLM runs on CUDA
    if choice == "fused" and not dps_kernels.available():
        raise DpsConfigError(
            "additional_config.dps.kernel is 'fused' but the compiled kernels are not installed: "
            "reinstall with a C++ compiler, or use 'auto'"
        )
    return choice != "exact" and dps_kernels.available()


_current: Rank | None = None


def begin(options: DpsOptions, index: int, device: torch.device) -> Rank:
    """Start this process's rank, before its model is loaded."""
    global _current
    end()
    _current = Rank(options, index, device)
    return _current


def end() -> None:
    """Close this process's rank, if it came so far as to have one."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def current() -> Rank:
    """This process's rank.

    Raises
    ------
    DpsConfigError
        When the worker is not a DPS worker.
    """
    if _current is None:
        raise DpsConfigError(
            "quantization 'dps' needs its own worker class: leave worker_cls at 'auto'"
        )
    return _current
