"""Two mappings of the same units."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.driver import PhysicalHandle, VmmError
from dps_ray.memory.geometry import plan_geometry
from dps_ray.memory.host_driver import HostDriver
from dps_ray.memory.region import Binding, ResidualMismatchError, SharedRegion

if TYPE_CHECKING:
    from conftest import BuildRig


class FailingDriver(HostDriver):
    """A host driver that refuses one call after ``budget`` calls of that name have passed."""

    def __init__(self, call: str, budget: int) -> None:
        super().__init__()
        self.call, self.budget = call, budget

        self.for_good = False

    def _spend(self, call: str, nbytes: int) -> None:
        if call == self.call:
            self.budget -= 1
            if self.budget == -1 or (self.for_good and self.budget < 0):
                raise VmmError(call, f"{nbytes} bytes", "injected")

    def create(self, nbytes: int) -> PhysicalHandle:
        self._spend("create", nbytes)
        return super().create(nbytes)

    def map(self, address: int, handle: PhysicalHandle) -> None:
        self._spend("map", handle.nbytes)
        super().map(address, handle)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:dps")


@pytest.mark.parametrize("binding", ["fixed", "any"])
@pytest.mark.parametrize("lend", [True, False])
def test_upload_puts_every_layer_in_place(build: BuildRig, binding: Binding, lend: bool) -> None:
    rig = build(binding, lend=lend)
    assert not rig.layers_intact()
    rig.region.upload_all()
    assert rig.layers_intact()
    rig.region.verify_all()


def test_kv_base_is_zero_and_apart_from_the_residual(build: BuildRig) -> None:
    rig = build()
    rig.region.upload_all()
    geometry = rig.region.geometry
    assert rig.region.kv_tensor.numel() == geometry.num_blocks * geometry.block_stride_bytes
    base = rig.region.kv_tensor[: geometry.base_blocks * geometry.block_stride_bytes]
    assert not base.any()
    base.fill_(255)
    assert rig.layers_intact()


def test_a_unit_shows_its_segment_in_the_kv_range(build: BuildRig) -> None:
    rig = build()
    rig.region.upload_all()
    for index in range(rig.region.geometry.num_units):
        segment = rig.region.segment_view(index)
        unit = rig.region.unit_kv_view(index)
        assert unit.numel() == rig.region.geometry.unit_bytes
        assert torch.equal(unit[: segment.numel()], segment)
        unit[5] ^= 0xFF
        assert torch.equal(unit[: segment.numel()], segment)
        assert not rig.region.verify(index)


def test_verify_all_names_the_damaged_segments(build: BuildRig) -> None:
    rig = build()
    rig.region.upload_all()
    rig.region.unit_kv_view(1)[0] ^= 1
    rig.region.unit_kv_view(3)[77] ^= 1
    with pytest.raises(ResidualMismatchError, match=r"segments \[1, 3\] of \d+ differ"):
        rig.region.verify_all()


def test_rebinding_keeps_segments_and_units_one_to_one(build: BuildRig) -> None:
    rig = build("any")
    region = rig.region
    units = range(region.geometry.num_units)
    for segment, unit in [(0, 2), (1, 0), (2, 2), (3, 1), (0, 3)]:
        region.rebind(segment, unit)
        assert region.unit_of(segment) == unit
        assert sorted(map(region.unit_of, units)) == list(units)
        assert all(region.unit_of(region.segment_of(index)) == index for index in units)
        region.unit_kv_view(unit).fill_(unit + 1)
        assert bool((region.segment_view(segment) == unit + 1).all())
    region.upload_all()
    assert rig.layers_intact()


def test_fixed_binding_refuses_another_unit(build: BuildRig) -> None:
    region = build("fixed").region
    region.rebind(1, 1)
    with pytest.raises(ValueError, match="segment 1 belongs to unit 1, not 2: binding is fixed"):
        region.rebind(1, 2)


@pytest.mark.parametrize("refused", [0, 1])
def test_a_refused_remap_leaves_the_binding_as_it_was(build: BuildRig, refused: int) -> None:
    driver = FailingDriver("map", budget=1 << 30)
    rig = build("any", driver=driver)
    rig.region.upload_all()
    driver.budget = refused
    with pytest.raises(VmmError, match="injected"):
        rig.region.rebind(0, 2)
    assert rig.region.unit_of(0) == rig.region.segment_of(0) == 0
    assert rig.layers_intact()


@pytest.mark.parametrize("passed", [0, 1])
def test_a_remap_that_cannot_be_put_back_is_not_read_and_the_next_one_mends_it(
    build: BuildRig, passed: int
) -> None:
    driver = FailingDriver("map", budget=1 << 30)
    rig = build("any", driver=driver)
    region = rig.region
    region.upload_all()
    driver.budget, driver.for_good = passed, True
    with pytest.raises(VmmError, match="injected"):
        region.rebind(0, 2)
    assert not region.maps(0, 0)
    assert not region.verify(0)
    with pytest.raises(ResidualMismatchError, match=r"segments \[0, 2\] of"):
        region.verify_all()
    driver.for_good = False
    region.rebind(0, 2)
    region.rebind(2, 0)
    assert region.maps(0, 2)
    assert region.maps(2, 0)
    region.upload_all()
    assert rig.layers_intact()
    region.close()
    assert driver.created_bytes == 0


@pytest.mark.parametrize(
    ("call", "budget"), [("create", 0), ("create", 2), ("map", 0), ("map", 1), ("map", 4)]
)
def test_a_failed_build_takes_nothing_and_can_be_tried_again(call: str, budget: int) -> None:
    driver = FailingDriver(call, budget)
    arena = ResidualArena(driver, 1 << 20)
    weight = torch.randint(0, 256, (30_000,), dtype=torch.uint8)
    view = arena.add("layer", weight)
    geometry = plan_geometry(
        kv_bytes=1 << 20, residual_bytes=arena.used_bytes, block_bytes=4096,
        granularity_bytes=driver.granularity_bytes, unit_bytes=8192,
    )  # fmt: skip
    with pytest.raises(VmmError, match="injected"):
        SharedRegion(driver, arena, geometry, "fixed")
    assert driver.created_bytes == 0
    with SharedRegion(driver, arena, geometry, "fixed") as region:
        region.upload_all()
        assert torch.equal(view, weight)
    assert driver.created_bytes == 0


@pytest.mark.parametrize("binding", ["fixed", "any"])
def test_closing_gives_everything_back(build: BuildRig, binding: Binding) -> None:
    # Else what an earlier test left to the collector is given back amid this one.
    gc.collect()
    files, before = len(os.listdir("/proc/self/fd")), mappings()
    rig = build(binding)
    if binding == "any":
        rig.region.rebind(0, 3)
        rig.region.rebind(1, 2)
    assert mappings() > before
    rig.views.clear()
    rig.region.close()
    rig.region.close()
    assert rig.driver.created_bytes == 0
    assert mappings() == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_geometry_for_another_residual_is_refused() -> None:
    driver = HostDriver()
    arena = ResidualArena(driver, 8192)
    arena.add("layer", torch.zeros(8000, dtype=torch.uint8))
    sizes = {"kv_bytes": 1 << 20, "block_bytes": 4096, "granularity_bytes": 4096}
    other = plan_geometry(residual_bytes=20_000, unit_bytes=4096, **sizes)
    with pytest.raises(ValueError, match="5 units of 4096 bytes for a residual of 8000 bytes"):
        SharedRegion(driver, arena, other, "fixed")
    large = plan_geometry(residual_bytes=20_000, unit_bytes=20_000, **sizes)
    with pytest.raises(ValueError, match="exceed the residual address range of 8192 bytes"):
        SharedRegion(driver, arena, large, "fixed")
    arena.close()


def test_unknown_units_and_segments_are_refused(build: BuildRig) -> None:
    region = build().region
    with pytest.raises(ValueError, match=r"unit -1 is not in 0\.\."):
        region.unit_kv_view(-1)
    with pytest.raises(ValueError, match=r"segment 99 is not in 0\.\."):
        region.segment_view(99)
    with pytest.raises(ValueError, match="unit 0 has no KV blocks"):
        build(lend=False).region.unit_kv_view(0)
