"""The CUDA driver under random histories of calls, some of them refused."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from dps_ray.memory.cuda_driver import CudaDriver
from dps_ray.memory.driver import PhysicalHandle, VirtualRange, VmmError

from .fake_cuda import FakeCuda, FakeTorch

GRANULE = 4096


class DriverLife(RuleBasedStateMachine):
    """Random calls, some of them refused; the bytes behind every mapping are known."""

    ranges = Bundle("ranges")
    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeCuda(device_bytes=64 * GRANULE)
        self.driver = CudaDriver(0, bindings=self.fake, torch_side=FakeTorch(self.fake))
        self.baseline = self.driver.free_and_total_bytes()
        self.live_ranges: set[VirtualRange] = set()
        self.stamps: dict[PhysicalHandle, int] = {}
        self.mappings: dict[int, PhysicalHandle] = {}

    @rule(
        name=st.sampled_from(
            ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap",
             "cuMemRelease", "cuMemAddressFree"]
        )
    )  # fmt: skip
    def the_next_call_of_this_name_is_refused(self, name: str) -> None:
        # One at a time: what undoes a refused call must not be refused as well.
        self.fake.refusals.clear()
        self.fake.refuse(name)

    @rule(target=ranges, granules=st.integers(1, 6))
    def reserve(self, granules: int) -> VirtualRange | None:
        with suppress(VmmError):
            made = self.driver.reserve(granules * GRANULE)
            self.live_ranges.add(made)
            return made
        return None

    @rule(target=handles, granules=st.integers(1, 3), stamp=st.integers(1, 255))
    def create(self, granules: int, stamp: int) -> PhysicalHandle | None:
        with suppress(VmmError):
            made = self.driver.create(granules * GRANULE)
            self.stamps[made] = 0
            return made
        return None

    @rule(reserved=ranges, handle=handles, offset=st.integers(0, 5), stamp=st.integers(1, 255))
    def map(
        self, reserved: VirtualRange | None, handle: PhysicalHandle | None, offset: int, stamp: int
    ) -> None:
        if reserved is None or handle is None:
            return
        address = reserved.address + offset * GRANULE
        with suppress(VmmError):
            self.driver.map(address, handle)
            self.mappings[address] = handle
            self.stamps[handle] = stamp
            self.driver.compute.zero(self.driver.tensor(address, handle.nbytes))
            self.driver.compute.synchronize()
            self.driver.tensor(address, handle.nbytes).fill_(stamp)

    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        if self.mappings:
            address = data.draw(st.sampled_from(sorted(self.mappings)))
            with suppress(VmmError):
                self.driver.unmap(address, self.mappings[address].nbytes)
                del self.mappings[address]

    @rule(handle=handles)
    def release(self, handle: PhysicalHandle | None) -> None:
        if handle is not None:
            with suppress(VmmError):
                self.driver.release(handle)
                assert handle not in self.mappings.values(), "a mapped handle was released"
                del self.stamps[handle]

    @rule(reserved=consumes(ranges))
    def free(self, reserved: VirtualRange | None) -> None:
        if reserved is not None:
            with suppress(VmmError):
                self.driver.free(reserved)
                self.live_ranges.remove(reserved)

    @invariant()
    def every_mapping_shows_its_handles_bytes(self) -> None:
        for address, handle in self.mappings.items():
            assert bool((self.driver.tensor(address, handle.nbytes) == self.stamps[handle]).all())

    @invariant()
    def memory_is_what_the_handles_hold(self) -> None:
        held = sum(handle.nbytes for handle in self.stamps)
        assert self.driver.created_bytes == held
        assert self.driver.free_and_total_bytes()[0] == self.baseline[0] - held

    def teardown(self) -> None:
        self.fake.refusals.clear()
        for address, handle in self.mappings.items():
            self.driver.unmap(address, handle.nbytes)
        for handle in self.stamps:
            self.driver.release(handle)
        for reserved in self.live_ranges:
            self.driver.free(reserved)
        self.driver.close()
        assert not self.fake.leaks


def test_no_history_of_calls_and_refusals_leaks_or_mixes_up_memory() -> None:
    run_state_machine_as_test(
        DriverLife,
        settings=settings(
            deadline=None,
            database=None,
            max_examples=60,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
