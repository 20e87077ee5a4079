"""The machine code of the grouped GEMM, for every tile of the checked-in table.

What is compiled is what `moe` launches: nothing here repeats a tile or an argument's type.
"""

import json
from functools import cache

import pytest
import torch
from dps_kernels import Planes
from dps_kernels.hopper import moe, table, tiles
from dps_kernels.hopper.arch import Arch
from dps_kernels.planes import K16

from tests.kernels.hopper.offline import Compiled, compile_launches

EXPERTS, HIDDEN, INNER, TOP_K = 128, 2048, 768, 8
ARCHS = {80: Arch(80, 108, 167936), 89: Arch(89, 142, 102400), 90: Arch(90, 132, 233472)}
REGISTERS, SHARED = 255, {80: 166912, 89: 101376, 90: 232448}
BOUNDS = {"full": 3.6, "fast": 3.2, "fp8": 0.6}
"""Integer operations per weight. The tensor cores take FP8 as it is: only addresses remain."""
MATRIX = {
    (80, False): "HMMA",
    (89, False): "HMMA",
    (89, True): "QMMA",
    (90, False): "HGMMA",
    (90, True): "QGMMA",
}

DECODE, PREFILL = 32, 4096


def layer(fmt, full):
    def planes(rows, columns):
        plane = torch.empty(EXPERTS, rows, columns, dtype=torch.uint8, device="meta")
        shift = plane[..., 0].to(torch.int8) if fmt == "e4m3_row" else None
        return Planes(plane, plane if full else None, fmt, shift, K16)

    return planes(2 * INNER, HIDDEN), planes(HIDDEN, INNER)


@cache
def launched(sm, tokens, full, fmt="e4m3_row", dtype=torch.bfloat16) -> dict[str, list[Compiled]]:
    """Kernels of one layer by name."""
    x = torch.empty(tokens, HIDDEN, dtype=dtype, device="meta")
    weights = torch.empty(tokens, TOP_K, device="meta")
    ids = torch.empty(tokens, TOP_K, dtype=torch.int32, device="meta")
    kernels = {}
    for kernel in compile_launches(
        lambda: moe.moe(x, *layer(fmt, full), weights, ids, ARCHS[sm]), sm
    ):
        kernels.setdefault(kernel.name, []).append(kernel)
    return kernels


def tile(kernel):
    return tuple(kernel.constants[name] for name in ("BM", "BN", "BK"))


def check(kernel, sm, kind):
    print(f"sm_{sm} {kind}: {kernel.summary(tile(kernel))}")
    assert kernel.spills == 0
    assert kernel.registers <= REGISTERS
    assert kernel.shared_bytes <= SHARED[sm]
    assert kernel.integer_per_weight(tile(kernel)) <= BOUNDS[kind]
    waits = sum(i.name == "WARPGROUP" and ".DEPBAR" in i.suffix for i in kernel.loop.body)
    assert waits <= kernel.loop.count(("HGMMA", "QGMMA")) / 2  # the next is issued while one runs


def table_entries():
    """Every entry for experts, with tokens that it serves."""
    cases = []
    for sm in ARCHS:
        for key, entries in json.loads(table.CHECKED_IN.read_text())[f"sm{sm}"].items():
            moe_, _, kind = key.partition(" ")
            if moe_ != "moe":
                continue
            # Where there are FP8 tensor cores, fast mode uses them for more routes than these.
            most = tiles.FP8_FROM_TOKENS - 1 if kind == "fast" and sm >= 89 else 512
            for entry in entries:
                routes = entry["tokens"] or most
                case = sm, kind, routes * EXPERTS // TOP_K, entry
                cases.append(pytest.param(*case, id=f"{sm}-{key}-{entry['tokens']}"))
    return cases


@pytest.mark.parametrize(("sm", "kind", "tokens", "entry"), table_entries())
def test_tile_spills_nothing_fits_and_decodes_under_the_bound(sm, kind, tokens, entry):
    gemms = launched(sm, tokens, kind == "full")["moe_gemm"]
    assert [gemm.constants["GATED"] for gemm in gemms] == [True, False]
    for gemm in gemms:
        assert tile(gemm) == tuple(entry[name] for name in ("bm", "bn", "bk"))
        assert (gemm.constants["FULL"], gemm.constants["FP8"]) == (kind == "full", kind == "fp8")
        assert gemm.has(MATRIX[sm, kind == "fp8"])
        check(gemm, sm, kind)


def test_e5m2_meets_the_same_bounds():
    for kernel in launched(90, DECODE, True, fmt="e5m2", dtype=torch.float16)["moe_gemm"]:
        check(kernel, 90, "full")


def test_e5m2_weights_meet_e4m3_activations_on_the_fp8_tensor_cores():
    for kernel in launched(90, PREFILL, False, fmt="e5m2", dtype=torch.float16)["moe_gemm"]:
        check(kernel, 90, "fp8")
        products = {i.suffix for i in kernel.loop.body if i.name == "QGMMA"}
        assert all("E5M2" in suffix and "E4M3" in suffix for suffix in products)


def test_a_gate_meets_its_up_without_leaving_the_thread():
    """Through shared memory go only results, half as many as those of the ungated GEMM."""
    gated, plain = launched(90, PREFILL, full=True)["moe_gemm"]
    assert gated.constants["GATED"]
    stores = [sum(i.name == "STSM" for i in kernel.code) for kernel in (gated, plain)]
    assert stores[0] * 2 == stores[1] > 0
    assert not any(i.name in ("STS", "SHFL") for i in gated.code)


def test_batches_of_one_tile_share_one_compilation():
    """Eight routes, 16 or 24 run the same code."""
    keys = [
        {kernel.key for kernels in launched(90, tokens, full=True).values() for kernel in kernels}
        for tokens in (1, 2, 3)
    ]
    assert keys[0] == keys[1] == keys[2]


def test_sorting_and_scaling_spill_nothing():
    for kernels in launched(90, DECODE, full=True).values():
        assert all(kernel.spills == 0 for kernel in kernels)
