"""Random histories of commands to one rank's memory, and what every byte must be."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from dps_ray.commands import RestoreTask, StepCommand
from dps_ray.memory.driver import Fence
from dps_ray.memory.manager import MemoryManager
from dps_ray.memory.pacing import Pacer
from dps_ray.memory.restore_result import RestoreResult
from dps_ray.modes import Mode

from .step_engines import TIMEOUT_S, HostSteps, StepEngine

if TYPE_CHECKING:
    from conftest import Rig


class NoFence:
    def wait(self) -> None:
        return


UNITS = tuple(range(6))
fill_bytes = st.lists(st.integers(1, 255), min_size=len(UNITS), max_size=len(UNITS))


class RankMachine(RuleBasedStateMachine):
    """Plays the scheduler and the KV cache, and knows what every byte must be."""

    build: Callable[..., Rig]
    engine_class: type[StepEngine] = HostSteps
    manager_class: type[MemoryManager] = MemoryManager
    verify = True
    patience_s = 0.001
    """How long a queued step lasts: what ignores its fence has this long to show it."""
    broken: str | None = None
    """What was found wrong, on the class: it outlives Hypothesis's replays."""

    def must(self, condition: bool, what: str) -> None:
        if not condition:
            type(self).broken = what
            raise AssertionError(what)

    @initialize(binding=st.sampled_from(["fixed", "any"]))
    def start(self, binding: str) -> None:
        self.engine = self.engine_class()
        self.rig = type(self).build(binding, driver=self.engine.driver)
        self.region = self.rig.region
        self.region.upload_all()
        self.results: list[RestoreResult] = []
        self.manager = self.manager_class(
            self.region,
            pacer=Pacer(max_inflation=0.05, floor_bytes_per_s=1e9),
            chunk_bytes=1024,
            verify=self.verify,
            on_done=self.results.append,
        )
        self.residual = self.rig.residual()
        assert self.region.geometry.num_units == len(UNITS)
        self.segment_in: dict[int, int] = {unit: unit for unit in UNITS}
        """Backed units, and the segment that is in place there."""
        self.kv: dict[int, int] = {}
        """Units lent to the KV cache, and the byte their blocks are filled with."""
        self.restoring: dict[int, RestoreTask] = {}
        self.epoch = 0

    @rule(moved=st.sets(st.sampled_from(UNITS)), values=fill_bytes, order=st.permutations(UNITS))
    def step(self, moved: set[int], values: list[int], order: list[int]) -> None:
        """One command that lends backed units, steals restoring ones and restores lent ones."""
        self.collect()
        lend = moved & self.segment_in.keys()
        steal = moved & self.restoring.keys()
        self.command(lend, steal, moved & self.kv.keys(), order, NoFence())
        for unit in sorted(lend | steal):
            self.write_first_kv(unit, values[unit])

    @rule(moved=st.sets(st.sampled_from(UNITS), min_size=1), order=st.permutations(UNITS))
    def restore_behind_a_queued_step(self, moved: set[int], order: list[int]) -> None:
        """Units become free while an earlier step, still queued, goes on writing into them."""
        self.settle()
        free = moved & self.kv.keys()
        queued = self.engine.queue_step(lambda: self.fill(free, 0xEE))
        self.command(set(), set(), free, order, queued.fence)
        self.manager.wait_idle(self.patience_s)
        queued.run()
        self.settle()

    @rule(moved=st.sets(st.sampled_from(UNITS), min_size=1), values=fill_bytes)
    def steal_what_has_just_been_given_back(self, moved: set[int], values: list[int]) -> None:
        """A burst returns before the restore's first chunk: all of it is cancelled."""
        self.settle()
        stolen = moved & self.kv.keys()
        queued = self.engine.queue_step(lambda: None)
        self.command(set(), set(), stolen, list(UNITS), queued.fence)
        self.command(set(), stolen, set(), list(UNITS), queued.fence)
        for unit in sorted(stolen):
            self.write_first_kv(unit, values[unit])
        queued.run()
        self.settle()

    @rule(moved=st.sets(st.sampled_from(UNITS), min_size=1), values=fill_bytes)
    def steal_amid_a_copy(self, moved: set[int], values: list[int]) -> None:
        """A burst returns once chunks are on their way, and its step runs before they land."""
        self.settle()
        if not (stolen := moved & self.kv.keys()):
            return
        copied_before = self.manager.counters().bytes
        with self.engine.chunks_stay_in_flight():
            self.command(set(), set(), stolen, list(UNITS), NoFence())
            give_up_at_s = time.monotonic() + TIMEOUT_S
            while self.manager.counters().bytes == copied_before:
                assert time.monotonic() < give_up_at_s, "no chunk of a restore was issued"
                time.sleep(1e-4)
            self.command(set(), stolen, set(), list(UNITS), NoFence())
            for unit in sorted(stolen):
                self.write_first_kv(unit, values[unit])
            self.region.driver.compute.synchronize()
        self.settle()

    @rule()
    def damage_the_next_copy(self) -> None:
        self.engine.damage_next_copy()

    @rule()
    def settle(self) -> None:
        assert self.manager.wait_idle(TIMEOUT_S)
        self.collect()
        assert not self.restoring, "a restore neither completed nor failed"

    @rule(order=st.permutations(UNITS))
    def return_to_full_mode(self, order: list[int]) -> None:
        self.engine.mend()
        self.settle()
        self.command(set(), set(), set(self.kv), order, NoFence())
        self.settle()
        assert not self.kv
        self.must(self.rig.layers_intact(), "a layer differs from the model")
        self.manager.verify_all()

    def command(
        self, lend: set[int], steal: set[int], free: set[int], order: list[int], fence: Fence
    ) -> None:
        """Apply one command; ``order`` decides which missing segment goes to which free unit."""
        cancel = tuple(self.restoring.pop(unit) for unit in sorted(steal))
        for unit in lend:
            del self.segment_in[unit]
        for unit in free:
            del self.kv[unit]
        placed = {*self.segment_in.values(), *(task.segment for task in self.restoring.values())}
        missing = [segment for segment in order if segment not in placed]
        tasks = []
        for unit in sorted(free):
            segment = unit if self.region.binding == "fixed" else missing.pop()
            self.epoch += 1
            tasks.append(RestoreTask(unit, segment, self.epoch))
        self.restoring |= {task.unit: task for task in tasks}
        zero = tuple(sorted(lend | steal))
        self.manager.apply(
            StepCommand(Mode.FAST, cancel=cancel, zero=zero, restore=tuple(tasks)), fence
        )

    def write_first_kv(self, unit: int, value: int) -> None:
        """The step's kernel finds the unit zeroed, and writes its blocks."""

        def kernel() -> None:
            self.must(not self.region.unit_kv_view(unit).any(), f"unit {unit} is not zero")
            self.fill({unit}, value)

        self.engine.launch(kernel)
        self.kv[unit] = value

    def fill(self, units: set[int], value: int) -> None:
        for unit in units:
            self.region.unit_kv_view(unit).fill_(value)

    def collect(self) -> None:
        """Take in finished restores; those that were cancelled since are no longer known."""
        while self.results:
            result = self.results.pop(0)
            task = result.task
            if self.restoring.get(task.unit) != task:
                continue
            del self.restoring[task.unit]
            if result.ok:
                self.segment_in[task.unit] = task.segment
            else:
                assert "differs from the backup" in str(result.error)
                self.kv[task.unit] = -1

    @invariant()
    def every_byte_is_what_it_must_be(self) -> None:
        unit_bytes = self.region.geometry.unit_bytes
        self.region.driver.compute.synchronize()
        for unit, value in self.kv.items():
            if value >= 0:
                blocks = self.region.unit_kv_view(unit)
                self.must(
                    bool((blocks == value).all()), f"KV blocks of unit {unit} were overwritten"
                )
        for unit, segment in self.segment_in.items():
            expected = self.residual[segment * unit_bytes : (segment + 1) * unit_bytes]
            weights = self.region.segment_view(segment)
            blocks = self.region.unit_kv_view(unit)[: expected.numel()]
            self.must(torch.equal(weights, expected), f"segment {segment} differs from the model")
            self.must(torch.equal(blocks, expected), f"segment {segment} is not in unit {unit}")

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()
            self.engine.close()
