"""The machine code of the grouped GEMM, for the tiles that the table gives real layers.

What is compiled is what `moe` launches: nothing here repeats a tile or an argument's type.
"""

from functools import cache

import pytest
import torch
from dps_kernels import Planes
from dps_kernels.hopper import moe
from dps_kernels.hopper.arch import Arch
from dps_kernels.planes import K16

from tests.kernels.hopper.offline import Compiled, compile_launches

EXPERTS, HIDDEN, INNER, TOP_K = 128, 2048, 768, 8
ARCHS = {80: Arch(80, 108, 167936), 89: Arch(89, 142, 102400), 90: Arch(90, 132, 233472)}
REGISTERS, SHARED = 255, {80: 166912, 89: 101376, 90: 232448}
BOUNDS = {"full": 3.6, "fast": 3.2, "fp8": 0.6}
"""Integer operations per weight. The tensor cores take FP8 as it is: only addresses remain."""

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


@pytest.mark.parametrize("tokens", [DECODE, 256, 600, PREFILL])
def test_full_mode_on_hopper_decodes_in_registers_for_its_tensor_cores(tokens):
    for kernel in launched(90, tokens, full=True)["moe_gemm"]:
        check(kernel, 90, "full")
        assert kernel.has("HGMMA")
        assert kernel.constants["FULL"]


@pytest.mark.parametrize("tokens", [DECODE, 600])
def test_fast_mode_of_few_tokens_reads_one_byte_a_weight(tokens):
    for kernel in launched(90, tokens, full=False)["moe_gemm"]:
        check(kernel, 90, "fast")
        assert kernel.has("HGMMA")


def test_fast_mode_of_many_tokens_runs_on_the_fp8_tensor_cores():
    for kernel in launched(90, PREFILL, full=False)["moe_gemm"]:
        check(kernel, 90, "fp8")
        assert kernel.has("QGMMA")


def test_e5m2_meets_the_same_bounds():
    for kernel in launched(90, DECODE, True, fmt="e5m2", dtype=torch.float16)["moe_gemm"]:
        check(kernel, 90, "full")


def test_e5m2_weights_meet_e4m3_activations_on_the_fp8_tensor_cores():
    for kernel in launched(90, PREFILL, False, fmt="e5m2", dtype=torch.float16)["moe_gemm"]:
        check(kernel, 90, "fp8")
        products = {i.suffix for i in kernel.loop.body if i.name == "QGMMA"}
        assert all("E5M2" in suffix and "E4M3" in suffix for suffix in products)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("tokens", [DECODE, PREFILL])
def test_ampere_decodes_each_weight_once(tokens, full):
    for kernel in launched(80, tokens, full)["moe_gemm"]:
        check(kernel, 80, "full" if full else "fast")
        assert kernel.has("HMMA")


def test_ada_multiplies_fp8_and_keeps_to_its_smaller_shared_memory():
    for kernel in launched(89, PREFILL, full=False)["moe_gemm"]:
        check(kernel, 89, "fp8")
        assert kernel.has("QMMA")
    for kernel in launched(89, DECODE, full=True)["moe_gemm"]:
        check(kernel, 89, "full")


def test_a_gate_meets_its_up_without_leaving_the_thread():
    """Through shared memory go only results, half as many as those of the ungated GEMM."""
    gated, plain = launched(90, PREFILL, full=True)["moe_gemm"]
    assert gated.constants["GATED"]
    stores = [sum(i.name == "STSM" for i in kernel.code) for kernel in (gated, plain)]
    assert stores[0] * 2 == stores[1] > 0
    assert not any(i.name in ("STS", "SHFL") for i in gated.code)


def test_no_number_of_tokens_needs_another_compilation():
    """Eight routes, 16 or 24 run the same code: nothing is compiled in the middle of serving."""
    keys = [
        {kernel.key for kernels in launched(90, tokens, full=True).values() for kernel in kernels}
        for tokens in (1, 2, 3)
    ]
    assert keys[0] == keys[1] == keys[2]


def test_sorting_and_scaling_spill_nothing():
    for kernels in launched(90, DECODE, full=True).values():
        assert all(kernel.spills == 0 for kernel in kernels)
