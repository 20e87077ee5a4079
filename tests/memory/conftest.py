"""Builds real regions on the host driver, small enough for thousands of steps."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import torch

from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.geometry import plan_geometry
from dps_ray.memory.host_driver import HostDriver
from dps_ray.memory.region import Binding, SharedRegion

from .stepped import Bench, MakeBench, SteppedDriver

BLOCK_BYTES = 2048
UNIT_BYTES = 8192


@dataclass
class Rig:
    """A region with layers that straddle its segments, and what they must contain."""

    driver: HostDriver
    arena: ResidualArena
    region: SharedRegion
    weights: list[torch.Tensor] = field(default_factory=list)
    """The bytes the layers were loaded with."""
    views: list[torch.Tensor] = field(default_factory=list)
    """The layers' views into the region."""

    def residual(self) -> torch.Tensor:
        """What all residual bytes must be, 1-D."""
        expected = torch.zeros(self.arena.used_bytes, dtype=torch.uint8)
        for entry, weight in zip(self.arena.entries, self.weights, strict=True):
            expected[entry.offset : entry.offset + entry.nbytes] = weight.flatten()
        return expected

    def layers_intact(self) -> bool:
        return all(map(torch.equal, self.views, self.weights))


BuildRig = Callable[..., Rig]


def build_rig(
    binding: Binding = "fixed",
    *,
    driver: HostDriver | None = None,
    shapes: tuple[tuple[int, ...], ...] = ((90, 111), (7, 3000), (3, 5, 77), (9000,)),
    unit_bytes: int = UNIT_BYTES,
    lend: bool = True,
) -> Rig:
    """Load seeded random layers and build the region; the caller closes ``region``."""
    driver = driver or HostDriver()
    generator = torch.Generator().manual_seed(7)
    weights = [
        torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes
    ]
    with ExitStack() as undo:
        arena = ResidualArena(driver, 1 << 30)
        undo.callback(arena.close)
        views = [arena.add(f"layer.{index}", weight) for index, weight in enumerate(weights)]
        geometry = plan_geometry(
            kv_bytes=10 * unit_bytes,
            residual_bytes=arena.used_bytes,
            block_bytes=BLOCK_BYTES,
            granularity_bytes=driver.granularity_bytes,
            unit_bytes=unit_bytes,
            lend=lend,
        )
        region = SharedRegion(driver, arena, geometry, binding)
        undo.pop_all()
    return Rig(driver, arena, region, weights, views)


@pytest.fixture
def build() -> Iterator[BuildRig]:
    """``build_rig``, closing what it built at the end of the test."""
    with ExitStack() as cleanup:

        def build_and_close(*args: object, **kwargs: object) -> Rig:
            rig = build_rig(*args, **kwargs)  # type: ignore[arg-type]
            cleanup.callback(rig.region.close)
            return rig

        yield build_and_close


@pytest.fixture
def builder() -> BuildRig:
    """``build_rig`` itself, for tests that close what they build."""
    return build_rig


@pytest.fixture
def bench(build: BuildRig) -> Iterator[MakeBench]:
    with ExitStack() as cleanup:

        def make(binding: str = "fixed", verify: bool = True) -> Bench:
            driver = SteppedDriver()
            made = Bench(build(binding, driver=driver), driver.stepped, verify)
            cleanup.callback(made.worker.stop)
            return made

        yield make
