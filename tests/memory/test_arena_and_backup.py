"""Residual bytes on their way into the region: placement and host copy."""

import pytest
import torch

from dps_ray.config import DpsConfigError
from dps_ray.memory.arena import ResidualArena
from dps_ray.memory.backup import ResidualBackup
from dps_ray.memory.driver import PhysicalHandle, VmmError
from dps_ray.memory.host_driver import HostDriver


class FullHost(HostDriver):
    """A host whose memory ends after a number of pieces."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self._pieces_left = pieces

    def create(self, nbytes: int) -> PhysicalHandle:
        if not self._pieces_left:
            raise VmmError("create", f"{nbytes} bytes", "Cannot allocate memory")
        self._pieces_left -= 1
        return super().create(nbytes)


def test_layers_start_on_cache_lines_and_are_backed_up_contiguously() -> None:
    driver = HostDriver()
    arena = ResidualArena(driver, 1 << 20)
    weights = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (1, 64, 1000, 129)]
    for index, weight in enumerate(weights):
        arena.add(str(index), weight)
    assert [entry.offset for entry in arena.entries] == [0, 64, 128, 1152]
    assert [entry.nbytes for entry in arena.entries] == [1, 64, 1000, 129]
    assert arena.used_bytes == 1152 + 192
    arena.seal(512)
    stored = torch.cat([arena.backup.segment(index) for index in range(3)])
    for entry, weight in zip(arena.entries, weights, strict=True):
        assert torch.equal(stored[entry.offset : entry.offset + entry.nbytes], weight)
    arena.close()


def test_views_have_the_layers_shape_and_memory_is_not_taken_yet() -> None:
    driver = HostDriver()
    arena = ResidualArena(driver, 1 << 40)
    lower = torch.randint(0, 256, (6, 40), dtype=torch.uint8).t()
    view = arena.add("transposed", lower)
    assert view.shape == (40, 6)
    assert view.is_contiguous()
    assert driver.created_bytes == 0
    arena.seal(4096)
    assert torch.equal(arena.backup.segment(0)[:240].view(40, 6), lower)
    arena.close()


def test_a_backup_spans_many_extents_without_moving() -> None:
    driver = HostDriver()
    backup = ResidualBackup(driver, 1 << 30, device=driver)
    content = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)
    backup.write(0, content[: 20 << 20])
    backup.write(20 << 20, content[20 << 20 :])
    backup.seal(content.numel(), content.numel())
    assert torch.equal(backup.segment(0), content)
    assert backup.nbytes == driver.created_bytes == 48 << 20
    backup.close()
    backup.close()
    assert driver.created_bytes == 0


def test_a_host_too_small_for_the_backup_is_named_with_bytes_and_remedy() -> None:
    driver = FullHost(pieces=1)
    backup = ResidualBackup(driver, 1 << 30, device=driver)
    with pytest.raises(DpsConfigError) as caught:
        backup.write(0, torch.zeros(20 << 20, dtype=torch.uint8))
    assert "20971520 bytes" in str(caught.value)
    assert "additional_config.dps.min_split_bytes" in str(caught.value)
    assert "\n" not in str(caught.value)
    backup.close()
    assert driver.created_bytes == 0


def test_the_arena_refuses_what_it_cannot_place() -> None:
    arena = ResidualArena(HostDriver(), 8192)
    with pytest.raises(ValueError, match=r"'h' is torch\.float16 of 3 elements"):
        arena.add("h", torch.zeros(3, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"'none' is torch\.uint8 of 0 elements"):
        arena.add("none", torch.zeros(0, dtype=torch.uint8))
    arena.add("first", torch.zeros(8000, dtype=torch.uint8))
    with pytest.raises(ValueError, match="'second' of 500 bytes at offset 8000 exceeds"):
        arena.add("second", torch.zeros(500, dtype=torch.uint8))
    arena.seal(4096)
    with pytest.raises(ValueError, match="'late' comes after the shared region was built"):
        arena.add("late", torch.zeros(1, dtype=torch.uint8))
    arena.close()
    arena.close()


def test_a_backup_beyond_its_budget_is_refused_before_the_memory_is_taken() -> None:
    driver = HostDriver()
    backup = ResidualBackup(driver, 1 << 30, device=driver, budget_bytes=40 << 20)
    backup.write(0, torch.zeros(30 << 20, dtype=torch.uint8))
    with pytest.raises(DpsConfigError, match=r"backup_budget_bytes is 41943040: .* 50331648 bytes"):
        backup.write(30 << 20, torch.zeros(3 << 20, dtype=torch.uint8))
    assert backup.nbytes == 32 << 20
    backup.close()


def test_the_backup_says_on_which_numa_nodes_it_lies() -> None:
    driver = HostDriver()
    backup = ResidualBackup(driver, 1 << 30, device=driver)
    backup.write(0, torch.ones(20 << 20, dtype=torch.uint8))
    assert sum(backup.bytes_by_node.values()) == 20 << 20
    backup.close()
