import argparse
import json

import pytest
import torch
from dps_kernels import K16, Planes
from dps_kernels.hopper import autotune, moe, tiles
from dps_kernels.hopper.arch import Arch

A100 = Arch(80, 108, 164 << 10)
H100 = Arch(90, 132, 228 << 10)


def test_checked_in_table_is_written_as_autotune_writes_it():
    text = tiles.TABLE.read_text()
    assert autotune.dump(json.loads(text)) == text


@pytest.mark.parametrize("arch", [A100, Arch(86, 84, 100 << 10), H100, Arch(100, 148, 228 << 10)])
@pytest.mark.parametrize("full", [True, False])
def test_every_generation_and_number_of_tokens_has_a_tile(arch, full):
    for tokens in (1, 16, 17, 64, 65, 300, 10**6):
        kind = tiles.kind_of(full, tokens, arch)
        assert tiles.choose(kind, tokens, 4096, 4096, arch).splits >= 1


def test_fast_mode_multiplies_in_fp8_only_where_tensor_cores_do_and_tokens_are_many():
    assert tiles.kind_of(False, 64, H100) == "fast"
    assert tiles.kind_of(False, 65, H100) == "fp8"
    assert tiles.kind_of(False, 65, A100) == "fast"


def test_splits_fill_the_gpu_once_and_leave_each_some_steps():
    tile = tiles.Tile(16, 64, 128, 4, 4)
    alone = tiles.fill(tile, "full", 1, 4096, 65536, H100)
    resident = H100.processors * (H100.shared_bytes // (tile.shared_bytes("full") + 1024))
    assert alone * 64 <= resident < (alone + 1) * 64
    assert tiles.fill(tile, "full", 1, 4096, 1024, H100) == 2  # of 8 steps, 4 each
    assert tiles.fill(tile, "full", 1, 150000, 4096, H100) == 1


def test_candidates_fit_the_shared_memory_and_decode_no_weight_twice():
    for arch in (A100, H100):
        for tokens in autotune.TOKENS:
            made = list(autotune.candidates("full", tokens, arch, 0))
            assert made
            assert all(t.shared_bytes("full") < arch.shared_bytes for t in made)
            assert arch is H100 or all(t.bn >= t.warps * t.bm for t in made)


def test_autotune_writes_the_fastest_tile_and_lookup_finds_it(tmp_path, monkeypatch):
    def measure_for(kind, tokens):
        return lambda tile: (
            abs(tile.bn - 128) + abs(tile.bk - 64) + tile.stages + abs(tile.splits - 4)
        )

    path = tmp_path / "tiles.json"
    autotune.write(path, autotune.tune((512, 1024), H100, measure_for), H100)
    monkeypatch.setenv(tiles.OVERRIDE, str(path))
    tile = tiles.lookup("full", 16, 512, 1024, H100)
    assert (tile.bn, tile.bk, tile.stages, tile.splits) == (128, 64, 2, 4)
    assert tiles.lookup("fp8", 10**6, 512, 1024, H100).bn == 128
    monkeypatch.delenv(tiles.OVERRIDE)
    assert tiles.lookup("full", 16, 512, 1024, H100) != tile


def test_experts_are_tuned_by_the_routes_each_gets_and_without_splits(tmp_path, monkeypatch):
    def measure_for(kind, routes):
        return lambda tile: abs(tile.bm - routes) + abs(tile.bn - 128) + tile.bk + tile.splits

    path = tmp_path / "tiles.json"
    autotune.write(path, autotune.tune((128, 1536, 2048, 8), H100, measure_for), H100)
    monkeypatch.setenv(tiles.OVERRIDE, str(path))
    planes = Planes(torch.empty(128, 1536, 2048, dtype=torch.uint8), None, "e4m3", None, K16)
    few, many = (moe.plan_for(routes * 128, planes, H100) for routes in (2, 512))
    assert (few.kind, few.tile.bm, few.tile.splits) == ("fast", 16, 1)
    assert (many.kind, many.tile.bm) == ("fp8", 128)


def test_weights_of_other_shapes_are_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="'4096x': give NxK"):
        autotune.weight_of("4096x")


def test_a_gpu_on_which_no_tile_runs_is_named_an_error():
    with pytest.raises(RuntimeError, match="no tile of kernel 'full' for 16 tokens"):
        autotune.fastest("full", 16, H100, lambda tile: float("inf"))
