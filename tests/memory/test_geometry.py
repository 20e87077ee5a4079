"""Sizes of units, blocks and ranges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_ray.config import DpsConfigError
from dps_ray.memory.geometry import (
    DEFAULT_UNIT_BYTES,
    DEFAULT_UNITS,
    MOST_DEFAULT_UNITS,
    Geometry,
    plan_geometry,
)

MIB = 1 << 20

sizes = st.fixed_dictionaries(
    {
        "kv_bytes": st.integers(0, 4 << 30),
        "residual_bytes": st.integers(1, 4 << 30),
        "block_bytes": st.integers(64, 8 * MIB),
        "granularity_bytes": st.sampled_from([4096, 65536, 2 * MIB]),
        "unit_bytes": st.none() | st.integers(1, 64 * MIB),
        "lend": st.booleans(),
    }
)


def plan_or_none(**arguments: object) -> Geometry | None:
    try:
        return plan_geometry(**arguments)  # type: ignore[arg-type]
    except DpsConfigError:
        return None


@given(sizes)
def test_units_are_whole_blocks_and_whole_granules(arguments: dict[str, int]) -> None:
    if plan := plan_or_none(**arguments):
        assert plan.block_stride_bytes >= arguments["block_bytes"]
        assert plan.unit_bytes == plan.blocks_per_unit * plan.block_stride_bytes
        assert plan.unit_bytes % arguments["granularity_bytes"] == 0
        assert plan.unit_bytes >= (arguments["unit_bytes"] or 0)


@given(sizes)
def test_units_hold_the_residual_and_none_is_empty(arguments: dict[str, int]) -> None:
    if plan := plan_or_none(**arguments):
        residual_bytes = arguments["residual_bytes"]
        assert plan.residual_span_bytes == plan.num_units * plan.unit_bytes
        assert residual_bytes <= plan.residual_span_bytes < residual_bytes + plan.unit_bytes


@given(sizes)
def test_total_memory_never_exceeds_what_was_given(arguments: dict[str, int]) -> None:
    if plan := plan_or_none(**arguments):
        given_bytes = arguments["kv_bytes"] + arguments["residual_bytes"]
        assert plan.total_bytes <= given_bytes
        unused_bytes = given_bytes - plan.total_bytes
        assert unused_bytes < plan.block_stride_bytes + arguments["granularity_bytes"]


@given(sizes)
def test_elastic_blocks_begin_on_a_granule(arguments: dict[str, int]) -> None:
    if plan := plan_or_none(**arguments):
        assert plan.base_span_bytes % arguments["granularity_bytes"] == 0
        assert 0 <= plan.pad_bytes < arguments["granularity_bytes"]
        elastic_bytes = plan.elastic_blocks * plan.block_stride_bytes
        assert plan.kv_span_bytes == plan.base_span_bytes + elastic_bytes
        assert plan.num_blocks == plan.base_blocks + plan.elastic_blocks
        assert plan.base_blocks >= 2


@given(sizes)
def test_lending_changes_neither_base_nor_units(arguments: dict[str, int]) -> None:
    elastic = plan_or_none(**{**arguments, "lend": True})
    static = plan_or_none(**{**arguments, "lend": False})
    assert (elastic is None) == (static is None)
    if elastic and static:
        assert elastic.elastic_blocks == elastic.num_units * elastic.blocks_per_unit
        assert static.elastic_blocks == 0
        for name in ("base_blocks", "block_stride_bytes", "unit_bytes", "num_units", "pad_bytes"):
            assert getattr(static, name) == getattr(elastic, name)


@given(sizes)
def test_default_units_are_few_for_a_small_residual_and_small_for_a_large_one(
    arguments: dict[str, int],
) -> None:
    if plan := plan_or_none(**{**arguments, "unit_bytes": None}):
        least_bytes = min(-(-arguments["residual_bytes"] // DEFAULT_UNITS), DEFAULT_UNIT_BYTES)
        assert plan.num_units <= max(
            DEFAULT_UNITS, -(-arguments["residual_bytes"] // DEFAULT_UNIT_BYTES)
        )
        asked_bytes = max(least_bytes, arguments["block_bytes"])
        assert plan.unit_bytes <= 4 * (asked_bytes + arguments["granularity_bytes"])


@pytest.mark.parametrize(
    ("residual_gib", "units", "unit_mib"), [(0.5, 64, 8), (7, 896, 8), (70, 1000, 72)]
)
def test_a_large_models_units_stay_small_until_there_are_too_many(
    residual_gib: float, units: int, unit_mib: int
) -> None:
    plan = plan_geometry(
        kv_bytes=16 << 30, residual_bytes=int(residual_gib * 2**30), block_bytes=2 * MIB,
        granularity_bytes=2 * MIB, unit_bytes=None,
    )  # fmt: skip
    assert plan.unit_bytes == unit_mib * MIB
    assert plan.num_units <= units <= MOST_DEFAULT_UNITS


@given(sizes)
def test_no_stride_serves_more_blocks_than_the_chosen_one(arguments: dict[str, int]) -> None:
    if plan := plan_or_none(**{**arguments, "lend": True}):
        granularity = arguments["granularity_bytes"]
        # A block already whole granules wastes nothing but the slack of the last unit.
        padded = -(-arguments["block_bytes"] // granularity) * granularity
        whole = plan_or_none(**{**arguments, "block_bytes": padded, "lend": True})
        if whole:
            assert plan.base_blocks + plan.num_blocks >= whole.base_blocks + whole.num_blocks


def test_blocks_that_fit_the_granule_are_not_padded() -> None:
    plan = plan_geometry(
        kv_bytes=64 * MIB, residual_bytes=64 * MIB, block_bytes=256 << 10,
        granularity_bytes=4096, unit_bytes=None,
    )  # fmt: skip
    assert (plan.block_stride_bytes, plan.unit_bytes) == (256 << 10, MIB)
    assert (plan.num_units, plan.base_blocks, plan.elastic_blocks) == (64, 256, 256)
    assert plan.pad_bytes == 0


def test_odd_blocks_are_padded_by_little_rather_than_by_a_granule() -> None:
    plan = plan_geometry(
        kv_bytes=10 * MIB, residual_bytes=512_000, block_bytes=6000,
        granularity_bytes=4096, unit_bytes=None,
    )  # fmt: skip
    assert plan.block_stride_bytes == 6144
    assert plan.unit_bytes == 12288


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_bytes": 4096}, ["kv_cache_memory_bytes is 4096", "at least 8192"]),
        (
            {"kv_bytes": 40_000, "unit_bytes": 900_000, "residual_bytes": 1_000_000},
            ["kv_cache_memory_bytes is 40000", "unit_bytes (is 900000)"],
        ),
        ({"unit_bytes": 2 * MIB}, ["dps.unit_bytes is 2097152", "at most 1048576"]),
        ({"residual_bytes": 0}, ["residual is 0 bytes", "min_split_bytes"]),
    ],
)  # fmt: skip
def test_too_little_memory_is_refused_with_field_value_and_remedy(
    changes: dict[str, int], words: list[str]
) -> None:
    arguments = {
        "kv_bytes": 16 * MIB, "residual_bytes": MIB, "block_bytes": 4096,
        "granularity_bytes": 4096, "unit_bytes": None,
    } | changes  # fmt: skip
    with pytest.raises(DpsConfigError) as caught:
        plan_geometry(**arguments)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@given(sizes)
def test_the_remedy_named_in_the_error_works(arguments: dict[str, int]) -> None:
    arguments |= {"unit_bytes": None, "kv_bytes": 0}
    try:
        plan_geometry(**arguments)  # type: ignore[arg-type]
    except DpsConfigError as error:
        enough = int(str(error).rsplit(" ", 1)[1])
        assert plan_geometry(**{**arguments, "kv_bytes": enough}).base_blocks >= 2  # type: ignore[arg-type]
