import argparse
import json

import pytest
import torch
from dps_kernels import K16, Planes
from dps_kernels.hopper import autotune, moe, table, tiles
from dps_kernels.hopper.arch import Arch

A100 = Arch(80, 108, 164 << 10)
H100 = Arch(90, 132, 228 << 10)


def test_checked_in_table_is_written_as_autotune_writes_it():
    text = table.CHECKED_IN.read_text()
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
    resident = H100.processors * (H100.shared_bytes // (tile.shared_bytes("full", H100) + 1024))
    assert alone * 64 <= resident < (alone + 1) * 64
    assert tiles.fill(tile, "full", 1, 4096, 1024, H100) == 2  # of 8 steps, 4 each
    assert tiles.fill(tile, "full", 1, 150000, 4096, H100) == 1


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)])
def test_full_mode_of_an_8b_model_at_few_tokens_fills_a_hopper_gpu_in_one_wave(shape):
    tile = tiles.choose("full", 16, *shape, H100)
    programs = -(-shape[0] // tile.bn) * tile.splits
    places = H100.processors * (H100.shared_bytes // (tile.shared_bytes("full", H100) + 1024))
    assert 0.95 * places <= programs <= places


def test_candidates_fit_the_shared_memory_and_decode_no_weight_twice():
    for arch in (A100, H100):
        for tokens in autotune.TOKENS:
            made = list(autotune.candidates("full", tokens, arch, 0))
            assert made
            assert all(t.shared_bytes("full", arch) < arch.shared_bytes for t in made)
            assert arch is H100 or all(t.bn >= t.warps * t.bm for t in made)


def test_autotune_writes_the_fastest_tile_and_lookup_finds_it(tmp_path, monkeypatch):
    def measure_for(kind, tokens):
        return lambda tile: (
            abs(tile.bn - 128) + abs(tile.bk - 64) + tile.stages + abs(tile.splits - 4)
        )

    path = tmp_path / "tiles.json"
    autotune.write(path, autotune.tune((512, 1024), H100, measure_for), H100)
    monkeypatch.setenv(table.OVERRIDE, str(path))
    tile = tiles.lookup("full", 16, 512, 1024, H100)
    assert (tile.bn, tile.bk, tile.stages, tile.splits) == (128, 64, 2, 4)
    assert tiles.lookup("fp8", 10**6, 512, 1024, H100).bn == 128
    monkeypatch.delenv(table.OVERRIDE)
    assert tiles.lookup("full", 16, 512, 1024, H100) != tile


def test_experts_are_tuned_by_the_routes_each_gets_and_without_splits(tmp_path, monkeypatch):
    def measure_for(kind, routes):
        return lambda tile: abs(tile.bm - routes) + abs(tile.bn - 128) + tile.bk + tile.splits

    path = tmp_path / "tiles.json"
    autotune.write(path, autotune.tune((128, 1536, 2048, 8), H100, measure_for), H100)
    monkeypatch.setenv(table.OVERRIDE, str(path))
    planes = Planes(torch.empty(128, 1536, 2048, dtype=torch.uint8), None, "e4m3", None, K16)
    few, many = (moe.plan_for(routes * 128, planes, H100) for routes in (2, 512))
    assert (few.kind, few.tile.bm, few.tile.splits) == ("fast", 16, 1)
    assert (many.kind, many.tile.bm) == ("fp8", 128)


def test_autotune_adds_to_a_table_and_leaves_a_broken_file_alone(tmp_path):
    tile = {"tokens": None, **tiles.Tile(16, 64, 128, 4, 4)._asdict()}
    path = tmp_path / "tiles.json"
    for arch, key in ((A100, "full 512x1024"), (H100, "full 512x1024"), (H100, "fast 512x1024")):
        autotune.write(path, {key: [tile]}, arch)
    grown = table.read(str(path))
    assert grown["sm80"]["full 512x1024"] == grown["sm90"]["fast 512x1024"] == [tile]
    assert "full 512x1024" in grown["sm90"]
    path.write_text("{}")
    with pytest.raises(table.TileTableError, match=r"^--output is '.*', which is no object"):
        autotune.write(path, {"full": [tile]}, H100)
    assert path.read_text() == "{}"


def test_weights_of_other_shapes_are_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="'4096x': give NxK"):
        autotune.weight_of("4096x")


def test_a_gpu_on_which_no_tile_runs_is_named_an_error():
    with pytest.raises(RuntimeError, match="no tile of kernel 'full' for 16 tokens"):
        autotune.fastest("full", 16, H100, lambda tile: float("inf"))


def without(field):
    return lambda tuned: tuned["sm90"]["fast"][0].pop(field)


def cut(generation, kind):
    return lambda tuned: tuned[generation].pop(kind)


def replaced(**fields):
    return lambda tuned: tuned["sm90"]["full"][0].update(fields)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (cut("sm90", "fast"), "has no 'fast' under 'sm90'"),
        (cut("sm89", "moe fp8"), "has no 'moe fp8' under 'sm89'"),
        (lambda tuned: tuned.pop("sm90"), "has no 'sm90', which is this GPU"),
        (lambda tuned: tuned.update(sm70={}), "has 'sm70': generations are sm80, sm89, sm90"),
        (without("stages"), "has no 'stages' in tile 0 under 'sm90', 'fast'"),
        (without("tokens"), "has no 'tokens' in tile 0 under 'sm90', 'fast'"),
        (lambda tuned: tuned["sm90"].update(fp8=[]), "has no list of tiles under 'sm90', 'fp8'"),
        (lambda tuned: tuned["sm90"].update(fp4=[]), "has 'fp4' under 'sm90', which names no"),
        (lambda tuned: tuned["sm90"]["full"].pop(), "the last is null and no other"),
        (replaced(tokens=64), "has 'tokens' 32 in tile 1, which do not rise"),
        (replaced(bm=48), "has bm 48 in tile 0, which no GPU can run"),
        (replaced(bn="64"), "has bn '64' in tile 0, which no GPU can run"),
        (replaced(stage=4), "has 'stage' in tile 0, which is no field of a tile"),
    ],
)
def test_a_table_that_cannot_serve_is_refused_with_what_is_wrong(
    spoil, fault, tmp_path, monkeypatch
):
    tuned = json.loads(table.CHECKED_IN.read_text())
    spoil(tuned)
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(tuned))
    monkeypatch.setenv(table.OVERRIDE, str(path))
    with pytest.raises(table.TileTableError) as refusal:
        tiles.choose("full", 1, 4096, 4096, H100)
    message = str(refusal.value)
    assert message.startswith(f"DPS_KERNELS_TILES is {str(path)!r}, which ")
    assert fault in message
    assert message.endswith("--output FILE', or leave DPS_KERNELS_TILES out")


def test_a_table_that_is_not_there_or_no_json_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(table.OVERRIDE, str(tmp_path / "none.json"))
    with pytest.raises(table.TileTableError, match=r"none\.json', which cannot be read \(No such"):
        tiles.lookup("full", 1, 4096, 4096, H100)
    (tmp_path / "cut.json").write_text('{"sm90": {')
    monkeypatch.setenv(table.OVERRIDE, str(tmp_path / "cut.json"))
    with pytest.raises(table.TileTableError, match=r"cut\.json', which is no JSON \("):
        tiles.lookup("full", 1, 4096, 4096, H100)
