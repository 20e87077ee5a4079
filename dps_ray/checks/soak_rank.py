"""One rank of the memory soak: real shared memory, a late compute stream, a link that can fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from dps_ray.checks.soak_point import FENCE_TIMEOUT_S, Point, SoakError
from dps_ray.commands import StepCommand
from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.geometry import plan_geometry
from dps_ray.memory.host_driver import HostDriver, HostExecutor
from dps_ray.memory.layers import layers_of
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.region import SharedRegion
from dps_ray.modes import Mode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dps_ray.checks.soak_links import FlakyLink
    from dps_ray.checks.soak_rules import Rules
    from dps_ray.engine.rank_section import RankSection
    from dps_ray.memory.driver import Executor, Fence
    from dps_ray.memory.region import Binding
    from dps_ray.memory.restore_result import RestoreResult

BLOCK_BYTES = 1024
UNIT_BYTES = 8192
CHUNK_BYTES = 4096
"""A unit takes two, and more than may be in flight at once: some may stand half copied."""
LAYER_SHAPES = ((90, 111), (7, 3000), (3, 5, 77), (9000,))
"""Layers of several sizes, none of which ends where a unit ends; the last unit is partly filled."""
KV_BYTES = 5 * UNIT_BYTES
RESTORE_BYTES_PER_S = 1e9
BUSY_STEP_S = 1.5 * CHUNK_BYTES / RESTORE_BYTES_PER_S
"""Enough for one or two slices of a segment."""


class LateStream(HostExecutor):
    """A compute stream; ``late`` lets it run behind the thread that feeds it, as a GPU's does."""

    def __init__(self) -> None:
        self.late = False
        self._work: deque[Callable[[], None]] = deque()

    def push(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def zero(self, tensor: torch.Tensor) -> None:
        if self.late or self._work:
            self.push(lambda: HostExecutor.zero(self, tensor))
        else:
            super().zero(tensor)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if self.late or self._work:
            self.push(lambda: HostExecutor.copy(self, destination, source))
        else:
            super().copy(destination, source)

    def wait_for(self, fence: Fence) -> None:
        if self.late or self._work:
            self.push(fence.wait)
        else:
            fence.wait()

    def synchronize(self) -> None:
        while self._work:
            self._work.popleft()()


class SoakDriver(HostDriver):
    """The host driver, with a late stream and a link that can fail."""

    def __init__(self, link: FlakyLink) -> None:
        super().__init__()
        self.stream = LateStream()
        self.link = link

    @property
    def compute(self) -> Executor:
        return self.stream

    @property
    def transfer(self) -> Executor:
        return self.link

    @property
    def between_steps(self) -> Executor | None:
        return self.link if self.link.depth == 1 else None


class SoakRank:
    """Memory of one rank, and what every byte of it must be.

    ``section`` receives the outcome of each restore and, ``by_layer``, where the layers lie.
    """

    def __init__(
        self, binding: Binding, rules: Rules, section: RankSection, seed: int, by_layer: bool,
        link: FlakyLink,
    ) -> None:  # fmt: skip
        self.driver = SoakDriver(link)
        arena = ResidualArena(self.driver, 1 << 20)
        generator = torch.Generator().manual_seed(seed)
        self._layers = [
            torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)
            for shape in LAYER_SHAPES
        ]
        self._views = [arena.add(f"layer.{i}", layer) for i, layer in enumerate(self._layers)]
        self.geometry = plan_geometry(
            kv_bytes=KV_BYTES,
            residual_bytes=arena.used_bytes,
            block_bytes=BLOCK_BYTES,
            granularity_bytes=self.driver.granularity_bytes,
            unit_bytes=UNIT_BYTES,
        )
        self.region = SharedRegion(self.driver, arena, self.geometry, binding)
        self.region.upload_all()
        self._section = section
        self.resumed_bytes = 0
        """Bytes that restores had in place when they went on after a burst."""
        self.memory = rules.memory(
            self.region,
            pacer=Pacer(max_inflation=0.05, floor_bytes_per_s=RESTORE_BYTES_PER_S),
            chunk_bytes=CHUNK_BYTES // link.depth,
            verify=rules.verify,
            on_done=self._restored,
        )
        kv = self.region.kv_tensor.numpy().view(np.uint64)
        self._kv = kv.reshape(self.geometry.num_blocks, -1)
        self._truth = [
            self.region.segment_view(segment).numpy().copy()
            for segment in range(self.geometry.num_units)
        ]
        self._checking = True
        self._last_step = Point()
        self._last_step.set()
        section["base_blocks"] = self.geometry.base_blocks
        section["elastic_blocks"] = self.geometry.elastic_blocks
        section["blocks_per_unit"] = self.geometry.blocks_per_unit
        section["units"] = self.geometry.num_units
        section["unit_bytes"] = self.geometry.unit_bytes
        if by_layer:
            section.layer_bounds = [(layer.start, layer.end) for layer in layers_of(arena.entries)]

    def step(
        self,
        command: StepCommand,
        written: NDArray[np.intp],
        owned: NDArray[np.intp],
        expected: NDArray[np.uint64],
    ) -> None:
        """Obey ``command`` now; queue the step's KV writes behind what the stream still has to do.

        Parameters
        ----------
        command
            Orders of the step.
        written
            Blocks the step's forward pass writes.
        owned
            All blocks of the KV cache at this step, live or free.
        expected
            What every block contains after the step: one word, repeated; indexed by block.
        """
        self.memory.apply(command, self._last_step)
        done = self._last_step = Point()
        self.driver.stream.push(lambda: self._run(command, written, owned, expected, done))

    def end_step(self, busy: bool) -> None:
        """Let this thread copy what a step's end allows; the restore thread goes on by itself
        beside a step that was not ``busy``."""
        copied_before = self.memory.counters().bytes
        self.memory.note_step(
            BUSY_STEP_S if busy else 0.0, load=int(busy), copied_before=copied_before
        )

    def wait_restored(self) -> None:
        """Wait for every restore that was ordered."""
        self.driver.stream.synchronize()
        self.end_step(busy=False)
        if not self.memory.wait_idle(FENCE_TIMEOUT_S):
            raise SoakError("a restore neither completed nor failed")

    def check_segment(self, segment: int, unit: int) -> None:
        """Assert that a segment is in place in ``unit``, byte for byte."""
        truth = self._truth[segment]
        start = (self.geometry.base_blocks * BLOCK_BYTES) + unit * UNIT_BYTES
        in_unit = self.region.kv_tensor.numpy()[start : start + truth.size]
        if not np.array_equal(self.region.segment_view(segment).numpy(), truth):
            raise SoakError(f"residual segment {segment} differs from the model")
        if not np.array_equal(in_unit, truth):
            raise SoakError(f"residual segment {segment} is not in unit {unit}")

    def check_layers(self, layers: Iterable[int], kind: str) -> None:
        """Assert that layers read the bytes they were loaded with."""
        for layer in layers:
            if not torch.equal(self._views[layer], self._layers[layer]):
                raise SoakError(f"layer {layer} differs from the model in a {kind} step")

    def abandon(self) -> None:
        """Tear down after something broke: what is still queued runs unchecked, to open fences."""
        self._checking = False
        self.driver.stream.synchronize()
        self.memory.close()
        self.driver.link.stop()

    def close(self) -> int:
        """Tear down; the bytes of memory that were not given back."""
        self.driver.stream.synchronize()
        self.memory.close()
        self.driver.link.stop()
        return self.driver.created_bytes

    def _run(
        self,
        command: StepCommand,
        written: NDArray[np.intp],
        owned: NDArray[np.intp],
        expected: NDArray[np.uint64],
        done: Point,
    ) -> None:
        """One forward pass: reads the weights, writes KV blocks; every KV block is compared."""
        if not self._checking:
            done.set()
            return
        if command.mode is Mode.FULL:
            self.check_layers(range(len(self._layers)), "full")
        self.check_layers(command.full_layers, "fast")
        self._kv[written] = expected[written, None]
        wrong = (self._kv[owned] != expected[owned, None]).any(axis=1)
        done.set()
        if wrong.any():
            block = int(owned[wrong.argmax()])
            found = int(self._kv[block, 0])
            raise SoakError(
                f"KV block {block} holds {found:#x} where {int(expected[block]):#x} was written"
                if expected[block]
                else f"KV block {block} of a lent unit is not zero: {found:#x}"
            )

    def _restored(self, result: RestoreResult) -> None:
        epoch = result.task.epoch
        self.resumed_bytes += result.resumed_bytes
        if result.error:
            self._section.error = result.error
        self._section.outcomes[result.task.unit] = epoch if result.ok else -epoch
