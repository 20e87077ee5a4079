"""What one kernel for both modes would cost: the table of ``dps_ray/engine/GRAPHS.md``.

A plain pipelined GEMM, compiled for full mode, for fast mode, and with a branch on a word in device
memory. ``pytest -s tests/kernels/hopper/test_mode_word.py`` prints the table's rows.
"""

from functools import cache

import pytest
import torch
import triton
import triton.language as tl
from dps_kernels.hopper import tiles
from dps_kernels.hopper.arch import Arch
from dps_kernels.hopper.decode import unscale, weight_tile
from dps_kernels.planes import K16, to_layout

from tests.kernels.hopper.interpreter import interpreted
from tests.kernels.hopper.offline import compile_launches
from tests.kernels.weights import nested, normal, values

A100, H100 = Arch(80, 108, 164 << 10), Arch(90, 132, 228 << 10)
FAST, FULL, WORD = 0, 1, 2
NAMES = {FULL: "full", FAST: "fast", WORD: "word"}
REGISTERS_OF_A_PROCESSOR = 65536
REGISTER_STEP = 8
"""A thread gets its registers in steps of so many."""


@triton.jit
def sums(
    x_at,
    upper_at,
    lower_at,
    K,
    FULL_: tl.constexpr,
    SM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        high = tl.load(upper_at + start // 4)
        low = tl.load(lower_at + start // 4) if FULL_ else high
        weights = weight_tile(high, low, False, FULL_, SM, BN, BK)
        acc = tl.dot(weights, tl.load(x_at + start).T, acc)
    return unscale(acc, False, FULL_, SM)


@triton.jit
def gemm(
    x,
    upper,
    lower,
    out,
    word,
    N,
    K,
    MODE: tl.constexpr,
    SM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.program_id(1) * BM + tl.arange(0, BM)
    x_at = x + token[:, None] * K + tl.arange(0, BK)[None, :]
    w_at = row[:, None] * (K // 4) + tl.arange(0, BK // 4)[None, :]
    if MODE == 2:
        if tl.load(word) == 1:
            acc = sums(x_at, upper + w_at, lower + w_at, K, True, SM, BM, BN, BK)
        else:
            acc = sums(x_at, upper + w_at, lower + w_at, K, False, SM, BM, BN, BK)
    else:
        acc = sums(x_at, upper + w_at, lower + w_at, K, MODE == 1, SM, BM, BN, BK)
    at = token[None, :] * N + row[:, None]
    tl.store(out + at, acc.to(tl.float16))


def launch(x, upper, lower, out, word, mode, sm, tile):
    (tokens, columns), rows = x.shape, upper.shape[0]
    gemm[(rows // tile.bn, tokens // tile.bm)](
        x, upper.view(torch.int32), lower.view(torch.int32), out, word, rows, columns,
        MODE=mode, SM=sm, BM=tile.bm, BN=tile.bn, BK=tile.bk,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@pytest.mark.parametrize("mode", [FULL, FAST])
def test_the_branch_on_the_word_runs_either_mode(mode):
    tile = tiles.Tile(16, 32, 32, 4, 2)
    weight, x = nested((64, 96), "e4m3", torch.float16), normal(16, 96, dtype=torch.float16, seed=1)
    planes = [to_layout(plane, K16) for plane in (weight.upper, weight.lower)]
    got = torch.empty(16, 64, dtype=torch.float16)
    with interpreted():
        launch(x, *planes, got, torch.tensor([mode], dtype=torch.int32), WORD, 90, tile)
    wanted = x.double() @ values(weight, mode == FULL).double().T
    torch.testing.assert_close(got.double(), wanted, rtol=2**-10, atol=2**-12)


@cache
def figures(arch, tokens):
    """Registers, shared memory and blocks a multiprocessor of each variant of the table's tile."""
    tile = tiles.lookup("full", tokens, 4096, 4096, arch)
    plane = torch.empty(4096, 4096, dtype=torch.uint8, device="meta")
    x, out = (torch.empty(tile.bm, 4096, dtype=torch.float16, device="meta") for _ in range(2))
    word = torch.empty(1, dtype=torch.int32, device="meta")
    made = {}
    for mode, name in NAMES.items():
        (code,) = compile_launches(
            lambda mode=mode: launch(x, plane, plane, out, word, mode, arch.sm, tile), arch.sm
        )
        assert code.spills == 0
        by_registers = REGISTERS_OF_A_PROCESSOR // (
            -(-code.registers // REGISTER_STEP) * REGISTER_STEP * 32 * tile.warps
        )
        by_memory = arch.shared_bytes // (code.shared_bytes + 1024)
        made[name] = code.registers, code.shared_bytes >> 10, min(by_registers, by_memory)
        print(
            f"\n| sm_{arch.sm}, {tile.bm} x {tile.bn} x {tile.bk} | {name} | {code.registers} "
            f"| {code.shared_bytes >> 10} KiB | {made[name][2]} | {code.spills} |",
            end="",
        )
    return made


@pytest.mark.parametrize(("arch", "tokens"), [(H100, 16), (H100, 128), (A100, 16)])
def test_the_branch_costs_few_registers_but_keeps_full_modes_shared_memory(arch, tokens):
    made = figures(arch, tokens)
    assert made["word"][0] <= made["full"][0] + REGISTER_STEP
    assert made["word"][1] == made["full"][1] > made["fast"][1]
    assert made["word"][2] == made["full"][2]


@pytest.mark.parametrize("arch", [H100, A100])
def test_with_few_tokens_fast_mode_alone_has_more_blocks_in_flight(arch):
    made = figures(arch, 16)
    assert made["fast"][2] > made["word"][2]
