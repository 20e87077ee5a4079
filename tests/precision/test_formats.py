"""Every one of the 65,536 bit patterns, through every format."""

import pytest
import torch

from dps_ray.precision.encode import encode
from dps_ray.precision.formats import Format
from dps_ray.precision.nested import decode_fast, decode_full

PATTERNS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
MAGNITUDE = PATTERNS & 0x7FFF
ELIGIBLE = {Format.E4M3: MAGNITUDE <= 0x3F7F, Format.E5M2: MAGNITUDE <= 0x7B7F}
COUNTS = {Format.E4M3: 32_512, Format.E5M2: 63_232}
FORMATS = [Format.E4M3, Format.E5M2]


def eligible(fmt):
    """All FP16 values that the format holds, as a [1, K] weight."""
    return PATTERNS[ELIGIBLE[fmt]].view(torch.float16)[None]


def bits(tensor):
    return tensor.view(torch.int16)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_eligible_pattern_decodes_bit_for_bit(fmt):
    weight = eligible(fmt)
    assert weight.numel() == COUNTS[fmt]
    assert torch.equal(bits(decode_full(encode(weight, fmt))), bits(weight))


@pytest.mark.parametrize("fmt", FORMATS)
def test_pairs_of_bytes_are_unique(fmt):
    nested = encode(eligible(fmt), fmt)
    pairs = nested.upper.int() << 8 | nested.lower.int()
    assert pairs.unique().numel() == COUNTS[fmt]


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_finite_weight_gets_a_nan_or_infinity_code(fmt):
    finite = PATTERNS[MAGNITUDE < 0x7C00].view(torch.float16)[None]
    code = encode(finite, fmt).upper & 0x7F
    assert int(code.max()) <= (0x7E if fmt is Format.E4M3 else 0x7B)


def test_e4m3_upper_byte_is_the_nearest_e4m3_code_of_w_times_256():
    weight = eligible(Format.E4M3)
    nearest = (weight.float() * 256).to(torch.float8_e4m3fn)
    assert torch.equal(encode(weight, "e4m3").upper, nearest.view(torch.uint8))


def test_e5m2_upper_byte_is_the_nearest_e5m2_code_except_at_ties():
    weight = eligible(Format.E5M2)
    upper = encode(weight, "e5m2").upper
    nearest = weight.float().to(torch.float8_e5m2).view(torch.uint8)
    tie = (bits(weight) & 0xFF) == 0x80
    assert torch.equal(upper[~tie], nearest[~tie])
    away = ((bits(weight).int() >> 8) & 0xFF) + 1
    assert torch.equal(upper[tie].int(), away[tie])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("fmt", "fp8", "scale"),
    [("e4m3", torch.float8_e4m3fn, 2.0**-8), ("e5m2", torch.float8_e5m2, 1.0)],
)
def test_fast_value_is_the_fp8_number_of_the_upper_byte(fmt, fp8, scale, dtype):
    nested = encode(eligible(Format(fmt)).to(torch.float16), fmt)
    nested = type(nested)(nested.fmt, nested.upper, nested.lower, None, dtype)
    expected = (nested.upper.view(fp8).float() * scale).to(dtype)
    assert torch.equal(bits(decode_fast(nested)), bits(expected))


@pytest.mark.parametrize("shift", range(-15, 25))
def test_row_format_is_exact_for_bf16_within_18_binades_of_the_row_maximum(shift):
    patterns = PATTERNS.view(torch.bfloat16)
    magnitude = patterns.float().abs()
    top = 1.75 * 2.0**-shift
    row = patterns[(magnitude <= top) & ((magnitude >= 2.0 ** (-17 - shift)) | (magnitude == 0))]
    nested = encode(row[None], "e4m3_row")
    assert nested.row_shift.tolist() == [shift]
    assert torch.equal(bits(decode_full(nested)), bits(row[None]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_finite_magnitude_alone_in_its_row_decodes_to_a_finite_value(dtype):
    values = PATTERNS.view(dtype)
    rows = values[values.isfinite()][:, None]
    nested = encode(rows, "e4m3_row")
    full, fast = decode_full(nested).float(), decode_fast(nested).float()
    assert full.isfinite().all()
    assert fast.isfinite().all()
    within = rows.float().abs() <= (1.75 * 2.0**126 if dtype == torch.bfloat16 else 1.75 * 2.0**15)
    assert torch.equal(full[within], rows.float()[within])
    # Half a step of a 3-bit mantissa, relative to the row's own maximum.
    assert ((fast - rows.float()).abs() <= rows.float().abs() / 16)[within].all()
