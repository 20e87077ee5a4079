"""The dense kernels in the interpreter, their PTX included, against float64."""

import pytest
import torch
from dps_kernels import K16
from dps_kernels.hopper import activations, dense
from dps_kernels.hopper.arch import Arch
from dps_kernels.hopper.tiles import Tile
from dps_kernels.planes import Planes, from_layout, to_layout

from tests.kernels.hopper.interpreter import interpreted
from tests.kernels.weights import FORMATS, nested, normal, values

AMPERE = Arch(80, 4, 160 << 10)
ADA = Arch(89, 4, 100 << 10)
HOPPER = Arch(90, 4, 224 << 10)
EPSILON = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
SMALL = Tile(16, 32, 64, 4, 2, 1)


def k16(weight, full):
    upper, lower = (to_layout(plane, K16) for plane in (weight.upper, weight.lower))
    return Planes(upper, lower if full else None, weight.fmt.value, weight.row_shift, K16)


def product(x, planes, bias, kind, tile, arch):
    out = torch.full((x.shape[0], planes.upper.shape[0]), torch.nan, dtype=x.dtype)
    with interpreted():
        dense.multiply(x, planes, bias, out, kind, tile, arch)
    return out


def assert_near(got, x, weight, bias):
    """Within the rounding of the result, and of float32 sums over terms of this size."""
    exact = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact += bias.double()
    allowed = EPSILON[got.dtype] * exact.abs() + 2**-18 * terms
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("arch", [AMPERE, HOPPER], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("full", [True, False], ids=["full", "fast"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_odd_shapes_are_masked_in_every_format_and_mode(fmt, full, dtype, arch):
    weight = nested((37, 208), fmt, dtype)  # K ends within a step, N and M within a tile
    x, bias = normal(19, 208, dtype=dtype, seed=1), normal(37, dtype=dtype, seed=2)
    got = product(x, k16(weight, full), bias, "full" if full else "fast", SMALL, arch)
    assert_near(got, x, values(weight, full), bias)


@pytest.mark.parametrize("arch", [ADA, HOPPER], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_fp8_multiplies_what_the_quantiser_made(fmt, arch):
    dtype = torch.bfloat16 if fmt == "e4m3_row" else torch.float16
    weight = nested((37, 208), fmt, dtype)
    x, bias = normal(19, 208, dtype=dtype, seed=1), normal(37, dtype=dtype, seed=2)
    got = product(x, k16(weight, False), bias, "fp8", SMALL, arch)
    with interpreted():
        codes, scale = activations.to_fp8(x)
    quantised = from_layout(codes.float(), K16) * scale[:, None]
    assert_near(got, quantised, values(weight, False), bias)


@pytest.mark.parametrize("kind", ["full", "fast", "fp8"])
@pytest.mark.parametrize("splits", [2, 3, 5])
def test_split_sums_add_up_also_of_uneven_splits_and_more_splits_than_steps(kind, splits):
    weight = nested((40, 256), "e4m3_row", torch.bfloat16)
    x = normal(3, 256, dtype=torch.bfloat16, seed=1)
    planes, whole = k16(weight, kind == "full"), Tile(16, 32, 64, 4, 2, 1)
    one = product(x, planes, None, kind, whole, HOPPER)
    parts = product(x, planes, None, kind, whole._replace(splits=splits), HOPPER)
    torch.testing.assert_close(parts, one, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("bm", [16, 64], ids=["in the loop", "beforehand"])
def test_bf16_activations_beyond_fp16_are_scaled_exactly(bm):
    weight = nested((32, 128), "e4m3_row", torch.bfloat16)
    x = normal(6, 128, dtype=torch.float32, seed=1)
    x *= torch.tensor([1e-30, 1e-8, 1, 1e6, 1e20, 0])[:, None]
    x[2, 7] = 3e5
    x = x.to(torch.bfloat16)
    tile = Tile(bm, 32, 64, 4, 2, 1)
    got = product(x, k16(weight, True), None, "full", tile, HOPPER)
    assert_near(got, x, values(weight, True), None)


@pytest.mark.parametrize("bm", [16, 64], ids=["in the loop", "beforehand"])
def test_full_mode_gives_the_bits_of_the_bf16_gemm(bm):
    weight = nested((64, 512), "e4m3_row", torch.bfloat16)
    x = normal(33, 512, dtype=torch.bfloat16, seed=1)
    got = product(x, k16(weight, True), None, "full", Tile(bm, 32, 64, 4, 2, 1), HOPPER)
    stock = (x.float() @ values(weight, True).float().T).to(torch.bfloat16)
    assert (got != stock).float().mean() < 0.005  # sums in another order, next to a rounding tie


@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
def test_linear_takes_tile_and_kernel_from_the_table(tokens):
    weight = nested((48, 512), "e4m3", torch.float16)
    x = normal(tokens, 512, dtype=torch.float16, seed=1)
    with interpreted():
        full = dense.linear(x.view(1, tokens, 512), k16(weight, True), None, HOPPER)
        fast = dense.linear(x, k16(weight, False), None, HOPPER)
    assert full.shape == (1, tokens, 48)
    assert_near(full[0], x, values(weight, True), None)
    exact = x.double() @ values(weight, False).double().T
    error = (fast.double() - exact).norm() / exact.norm()
    assert error < (0.04 if tokens >= 65 else 1e-3)  # W8A8 rounds activations to 3 bits


@pytest.mark.parametrize("view", ["last columns", "odd stride", "one token", "one row again"])
def test_activations_that_the_gpu_cannot_copy_in_tiles_are_copied_first(view):
    weight = nested((32, 64), "e4m3", torch.float16)
    wide = normal(4, 77, dtype=torch.float16, seed=1)
    x = {
        "last columns": wide[:, 13:],
        "odd stride": wide[:, :64],
        "one token": wide[2:3, :64],
        "one row again": wide[1:2, :64].expand(4, 64),
    }[view]
    got = product(x, k16(weight, True), None, "full", SMALL, HOPPER)
    assert_near(got, x, values(weight, True), None)


def test_planes_off_16_bytes_are_refused():
    weight = nested((32, 64), "e4m3", torch.float16)
    planes = k16(weight, False)
    shifted = torch.empty(32 * 64 + 4, dtype=torch.uint8)[4:].view(32, 64).copy_(planes.upper)
    with pytest.raises(ValueError, match=r"upper starts at address .* must be a multiple of 16"):
        dense.linear(torch.ones(1, 64), planes._replace(upper=shifted), None, HOPPER)


def test_no_tokens_make_no_launch():
    weight = nested((48, 64), "e4m3", torch.float16)
    assert dense.linear(torch.empty(0, 64), k16(weight, True), None, HOPPER).shape == (0, 48)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scaling_to_fp16_keeps_every_bit_of_bf16(dtype):
    x = normal(5, 300, seed=3).to(torch.bfloat16).to(dtype)
    x[1] *= 2.0**-12
    x[3] = 0
    with interpreted():
        half, scale = activations.to_fp16(x)
    assert half.dtype == torch.float16
    assert torch.equal(half.float() * scale[:, None], x.float())


def test_quantising_to_fp8_uses_the_whole_range_and_permutes_like_the_weights():
    x = normal(4, 5008, seed=3)  # more than one block
    with interpreted():
        codes, scale = activations.to_fp8(x)
    back = from_layout(codes.float(), K16)
    assert torch.equal(back.abs().amax(1), torch.full((4,), 448.0))
    torch.testing.assert_close(scale, x.abs().amax(1) / 448)
    # Rounded to nearest: half a unit of three mantissa bits, or of the smallest subnormal.
    error = (back * scale[:, None] - x).abs()
    assert (error <= torch.maximum(x.abs() * 2**-4, scale[:, None] * 2**-10) * 1.001).all()
