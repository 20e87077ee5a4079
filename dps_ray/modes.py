"""The two precision modes and what may be asked of them, shared by every room."""

from enum import StrEnum


class Mode(StrEnum):
    """Precision of one forward pass. In a full pass every layer is full; in a fast one none is, but
    for layers that return ahead of the others (``return_by: layer``)."""

    FULL = "full"
    """Upper and lower bytes together: the 16-bit model."""
    FAST = "fast"
    """The upper bytes alone: the nested FP8 model."""


class Pin(StrEnum):
    """What an operator asks of a replica's mode."""

    AUTO = "auto"
    """The switching policy decides."""
    FULL = "full"
    """Never lend weight memory; return to full mode as soon as memory allows."""
    FAST = "fast"
    """Run in fast mode and never restore."""


class Floor(StrEnum):
    """Lowest precision a request accepts: header ``X-DPS-Precision``, or ``dps_precision`` among
    the extra arguments of its sampling parameters."""

    ANY = "any"
    PREFER_FULL = "prefer-full"
    """Full mode where there is some; fast mode rather than waiting."""
    FULL = "full"
    """Full mode or no answer."""
