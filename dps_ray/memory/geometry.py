"""Sizes of one rank's memory: how KV blocks, physical units and mapping granules fit together."""

from dataclasses import dataclass, replace
from math import lcm

from dps_ray.config import DpsConfigError

DEFAULT_UNITS = 64
"""With no unit size asked for, a small residual is cut into at most this many units."""

DEFAULT_UNIT_BYTES = 8 << 20
"""Units of a larger residual: a lend zeroes a whole one between two steps, which must stay below a
millisecond where one core does it."""

MOST_DEFAULT_UNITS = 1000
"""Beyond this many units they grow again, whatever a lend then takes."""

MIN_BASE_BLOCKS = 2
"""Block 0 is vLLM's null block and never holds a request, so one more is the least that serves."""

_MAX_UNIT_GROWTH = 4
"""How many times larger than asked for a unit may be, to pad KV blocks less."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layout of the KV range ``[pad | base | elastic]`` and of the residual range.

    A physical unit is whole KV blocks and whole mapping granules. The base range ends on a granule
    boundary; block 0 starts ``pad_bytes`` after the range's start.
    """

    block_stride_bytes: int
    """Distance between two KV blocks, at least their size."""
    blocks_per_unit: int
    unit_bytes: int
    num_units: int
    """Units that hold the residual; the last one may be filled in part."""
    base_blocks: int
    elastic_blocks: int
    """KV blocks that live in the units: ``num_units * blocks_per_unit``, or 0 without lending."""
    num_blocks: int
    pad_bytes: int
    kv_span_bytes: int
    """Address space of ``[pad | base | elastic]``."""
    residual_span_bytes: int
    """Address space of the residual: ``num_units * unit_bytes``."""

    @property
    def base_span_bytes(self) -> int:
        """Physical memory of ``[pad | base]``, whole granules."""
        return self.pad_bytes + self.base_blocks * self.block_stride_bytes

    @property
    def total_bytes(self) -> int:
        """Physical memory of the rank's KV cache and residual together."""
        return self.base_span_bytes + self.residual_span_bytes


def plan_geometry(
    *,
    kv_bytes: int,
    residual_bytes: int,
    block_bytes: int,
    granularity_bytes: int,
    unit_bytes: int | None,
    lend: bool = True,
) -> Geometry:
    """Fit KV blocks, units and granules into ``kv_bytes + residual_bytes`` of physical memory.

    Where block and granule sizes do not divide each other, either blocks are padded or units grow,
    and the unused end of the last unit with them. Among the strides that keep a unit within four
    times the size asked for, the one with the most KV blocks in full and in fast mode together is
    taken, then the smallest unit.

    Parameters
    ----------
    kv_bytes
        Memory for KV blocks besides the residual, bytes. The unused end of the last unit is taken
        out of it, so that lending changes no total.
    residual_bytes
        Bytes that must always have a place in the units.
    block_bytes
        Size of one KV block over all layers, bytes.
    granularity_bytes
        Smallest piece of memory the driver maps, bytes.
    unit_bytes
        Smallest unit size, bytes; ``None`` for the default: a residual of up to 512 MiB is cut
        into 64 units, a larger one into units of 8 MiB, one beyond 7.8 GiB into 1,000 units.
    lend
        ``False`` keeps the same base and units, without elastic blocks.

    Raises
    ------
    DpsConfigError
        When the memory holds less than one unit and two base blocks.
    """
    if residual_bytes <= 0:
        raise DpsConfigError(
            f"the residual is {residual_bytes} bytes, less than one unit: lower "
            "additional_config.dps.min_split_bytes or allow more additional_config.dps.formats"
        )
    if unit_bytes is not None and unit_bytes > residual_bytes:
        raise DpsConfigError(
            f"additional_config.dps.unit_bytes is {unit_bytes}: the residual of "
            f"{residual_bytes} bytes fills less than one unit; use at most {residual_bytes}"
        )
    asked_bytes = unit_bytes or _default_unit_bytes(residual_bytes)
    target_bytes = _round_up(max(asked_bytes, block_bytes), granularity_bytes)
    plans = [
        _plan(kv_bytes, residual_bytes, stride_bytes, granularity_bytes, target_bytes)
        for stride_bytes in _strides(block_bytes, granularity_bytes, target_bytes)
    ]
    usable = [plan for plan in plans if plan.base_blocks >= MIN_BASE_BLOCKS]
    if not usable:
        raise _too_little(kv_bytes, residual_bytes, unit_bytes, plans, granularity_bytes)
    best = max(usable, key=lambda plan: (plan.base_blocks + plan.num_blocks, -plan.unit_bytes))
    if lend:
        return best
    return replace(
        best,
        elastic_blocks=0,
        num_blocks=best.base_blocks,
        kv_span_bytes=best.base_span_bytes,
    )


def _default_unit_bytes(residual_bytes: int) -> int:
    small = min(-(-residual_bytes // DEFAULT_UNITS), DEFAULT_UNIT_BYTES)
    return max(small, -(-residual_bytes // MOST_DEFAULT_UNITS))


def _strides(block_bytes: int, granularity_bytes: int, target_bytes: int) -> list[int]:
    """Every stride worth trying: the block rounded up to each power of two within a granule.

    For a given alignment the smallest stride has the smallest odd part, hence the smallest common
    multiple with the granule; others only lose memory.
    """
    alignments = [1 << bit for bit in range(granularity_bytes.bit_length())]
    strides = {_round_up(block_bytes, alignment) for alignment in [*alignments, granularity_bytes]}
    limit_bytes = _MAX_UNIT_GROWTH * target_bytes
    return sorted(s for s in strides if lcm(s, granularity_bytes) <= limit_bytes)


def _plan(
    kv_bytes: int,
    residual_bytes: int,
    stride_bytes: int,
    granularity_bytes: int,
    target_bytes: int,
) -> Geometry:
    unit_bytes = _round_up(target_bytes, lcm(stride_bytes, granularity_bytes))
    num_units = -(-residual_bytes // unit_bytes)
    residual_span_bytes = num_units * unit_bytes
    base_budget_bytes = max(0, kv_bytes + residual_bytes - residual_span_bytes)
    base_blocks = base_budget_bytes // granularity_bytes * granularity_bytes // stride_bytes
    base_bytes = base_blocks * stride_bytes
    pad_bytes = -base_bytes % granularity_bytes
    blocks_per_unit = unit_bytes // stride_bytes
    elastic_blocks = num_units * blocks_per_unit
    return Geometry(
        block_stride_bytes=stride_bytes,
        blocks_per_unit=blocks_per_unit,
        unit_bytes=unit_bytes,
        num_units=num_units,
        base_blocks=base_blocks,
        elastic_blocks=elastic_blocks,
        num_blocks=base_blocks + elastic_blocks,
        pad_bytes=pad_bytes,
        kv_span_bytes=pad_bytes + base_bytes + residual_span_bytes,
        residual_span_bytes=residual_span_bytes,
    )


def _too_little(
    kv_bytes: int,
    residual_bytes: int,
    unit_bytes: int | None,
    plans: list[Geometry],
    granularity_bytes: int,
) -> DpsConfigError:
    needed_bytes = min(
        plan.residual_span_bytes
        - residual_bytes
        + _round_up(MIN_BASE_BLOCKS * plan.block_stride_bytes, granularity_bytes)
        for plan in plans
    )
    remedy = f"give kv_cache_memory_bytes at least {needed_bytes}"
    if unit_bytes is not None:
        remedy += f", or lower additional_config.dps.unit_bytes (is {unit_bytes})"
    return DpsConfigError(
        f"kv_cache_memory_bytes is {kv_bytes}: no room for {MIN_BASE_BLOCKS} base KV blocks beside "
        f"the unused end of the last unit; {remedy}"
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
