"""Machine code of the dense kernels, for every tile of the checked-in table, without a GPU."""

import json

import pytest
import torch
from dps_kernels import K16
from dps_kernels.hopper import dense, table, tiles
from dps_kernels.hopper.arch import Arch
from dps_kernels.planes import Planes

from tests.kernels.hopper.offline import compile_launches

A100 = Arch(80, 108, 164 << 10)
L40 = Arch(89, 142, 100 << 10)
H100 = Arch(90, 132, 228 << 10)
MOST_INTEGER_OPERATIONS = {"full": 3.6, "fast": 3.2, "fp8": 0.6}
TABLE = json.loads(table.CHECKED_IN.read_text())


def matrix_instruction(kind, arch):
    if arch.sm == 90:
        return "QGMMA" if kind == "fp8" else "HGMMA"
    return "QMMA" if kind == "fp8" else "HMMA"


def meta(*shape, dtype=torch.uint8):
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(arch, kind, tokens, fmt="e4m3", dtype=torch.float16, rows=4096, columns=4096):
    """Give the GEMM that a launch of so many tokens starts, and its tile."""
    lower = meta(rows, columns) if kind == "full" else None
    shift = meta(rows, dtype=torch.int8) if fmt == "e4m3_row" else None
    planes = Planes(meta(rows, columns), lower, fmt, shift, K16)
    shapes = (tokens, columns), (rows,), (tokens, rows)
    x, bias, out = (meta(*shape, dtype=dtype) for shape in shapes)
    tile = tiles.choose(kind, tokens, rows, columns, arch)
    kernels = compile_launches(
        lambda: dense.multiply(x, planes, bias, out, kind, tile, arch), arch.sm
    )
    assert all(kernel.spills == 0 for kernel in kernels)
    (gemm,) = (kernel for kernel in kernels if kernel.name == "gemm")
    return gemm, tile


def check(arch, kind, tokens, fmt="e4m3", dtype=torch.float16, **shape):
    """Read the code of a launch and print its figures (-s)."""
    gemm, tile = compiled(arch, kind, tokens, fmt, dtype, **shape)
    per_weight = gemm.integer_per_weight((tile.bm, tile.bn, tile.bk))
    print(
        f"\nsm_{arch.sm} {kind} {fmt} {dtype} {tile.bm}x{tile.bn}x{tile.bk}, {tile.warps} warps: "
        f"{per_weight:.2f} integer operations a weight, {gemm.registers} registers"
    )
    assert gemm.has(matrix_instruction(kind, arch))
    assert per_weight <= MOST_INTEGER_OPERATIONS[kind]
    assert gemm.shared_bytes <= arch.shared_bytes - 1024
    # From the tile, `tiles.fill` knows how many programs are resident at once; before Hopper tokens
    # that were scaled in the loop take a buffer of their own on their way to the tensor cores.
    scaled = gemm.constants["SCALE_X"] and arch.sm < 90
    known = tile.shared_bytes(kind, arch) + scaled * tile.bm * tile.bk * 2
    assert 0 <= gemm.shared_bytes - known <= 128
    if gemm.has("HGMMA"):
        # Not one by one: the next is decoded and issued while the last runs.
        waits = sum(".DEPBAR" in i.suffix for i in gemm.loop.body if i.name == "WARPGROUP")
        assert waits <= gemm.loop.count(("HGMMA",)) / 2
    return gemm


def dense_tiles():
    """Every entry of the table."""
    cases = []
    for arch in (A100, L40, H100):
        for key, entries in TABLE[tiles.generation(arch)].items():
            kind, *shape = key.split()
            if kind not in MOST_INTEGER_OPERATIONS:
                continue
            rows, columns = map(int, shape[0].split("x")) if shape else (4096, 4096)
            for entry in entries:
                case = arch, kind, entry["tokens"] or 4096, rows, columns
                cases.append(pytest.param(*case, id=f"{arch.sm}-{key}-{entry['tokens']}"))
    return cases


@pytest.mark.parametrize(("arch", "kind", "tokens", "rows", "columns"), dense_tiles())
def test_tile_spills_nothing_fits_and_decodes_under_the_bound(arch, kind, tokens, rows, columns):
    check(arch, kind, tokens, rows=rows, columns=columns)


@pytest.mark.parametrize("tokens", [16, 32, 4096])
@pytest.mark.parametrize("arch", [A100, H100], ids=["80", "90"])
def test_bf16_stays_under_the_bound_scaled_in_the_loop_or_beforehand(arch, tokens):
    gemm = check(arch, "full", tokens, "e4m3_row", torch.bfloat16)
    assert gemm.constants["SCALE_X"] is (tokens <= dense.SCALED_IN_LOOP)


@pytest.mark.parametrize("kind", ["full", "fast", "fp8"])
def test_e5m2_needs_no_more_than_e4m3(kind):
    check(H100, kind, 16, "e5m2")


def test_prefill_on_hopper_multiplies_by_two_warpgroups_256_tokens_at_a_time():
    gemm = check(H100, "full", 4096)
    assert (gemm.warps, gemm.constants["BM"]) == (8, 256)


def test_batches_of_one_tile_share_one_compilation():
    assert len({compiled(H100, "full", tokens)[0].key for tokens in (1, 2, 16)}) == 1
