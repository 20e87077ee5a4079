"""The nested formats: how 16 bits split into an FP8 upper byte and a residual lower byte."""

from enum import StrEnum


class Format(StrEnum):
    """Encoding of one layer. All of them carry FP16 bits: ``sign | 5 exponent | 10 mantissa``."""

    E4M3 = "e4m3"
    """Upper byte: E4M3 code of ``w * 2^8``; lower byte: the raw low byte of FP16."""
    E5M2 = "e5m2"
    """Upper byte: E5M2 code of ``w``, ties away from zero: round-to-nearest-even would map 257
    FP16 values onto some codes, which 8 residual bits cannot tell apart."""
    E4M3_ROW = "e4m3_row"
    """``E4M3`` of ``w * 2^k`` with an exact power of two per output row."""


ELIGIBLE_MAX = {Format.E4M3: 1.8125, Format.E5M2: 61_408.0}
"""Largest ``|w|`` for which the upper byte is also the nearest FP8 value. ``E4M3_ROW`` takes any
finite weight."""

MAGNITUDE_MAX = {Format.E4M3: 0x3F7F, Format.E4M3_ROW: 0x3F7F, Format.E5M2: 0x7B7F}
"""Largest FP16 magnitude (bits without the sign) that a format holds; encoding saturates there."""

SHIFT_MAX = 126
"""Largest ``|k|``: ``2^k`` and ``2^-k`` stay normal float32 numbers, so that neither encoding nor
decoding depends on how the CPU treats subnormals."""
