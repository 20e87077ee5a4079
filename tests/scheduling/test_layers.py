"""Layers that return ahead of the others: which of them a step may run in full precision."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.layers import LayerSegments

from .replica import LIMITS, Replica

SEGMENT_BYTES = 8
sizes = st.lists(st.integers(1, 3 * SEGMENT_BYTES), min_size=1, max_size=12)


def bounds_of(sizes: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(sizes, initial=0)))


@given(sizes, st.data())
def test_a_layer_is_complete_when_every_byte_of_it_is_in_place(
    sizes: list[int], data: st.DataObject
) -> None:
    bounds = bounds_of(sizes)
    segments = range(-(-bounds[-1][1] // SEGMENT_BYTES))
    missing = data.draw(st.sets(st.sampled_from(segments)))
    in_place = [byte // SEGMENT_BYTES not in missing for byte in range(bounds[-1][1])]
    complete = LayerSegments.cut(bounds, SEGMENT_BYTES).complete(missing)
    assert complete == tuple(
        layer for layer, (start, end) in enumerate(bounds) if all(in_place[start:end])
    )


@given(sizes, st.data())
def test_what_comes_back_takes_no_layer_away(sizes: list[int], data: st.DataObject) -> None:
    layers = LayerSegments.cut(bounds_of(sizes), SEGMENT_BYTES)
    missing = data.draw(st.sets(st.integers(0, layers.spans[-1][1])))
    order = data.draw(st.permutations(sorted(missing)))
    seen = [{*layers.complete(order[back:])} for back in range(len(order) + 1)]
    assert all(before <= after for before, after in pairwise(seen))
    assert len(seen[-1]) == len(sizes)


def returning(binding: str = "fixed") -> Replica:
    """Four units of one layer each, all lent and free again, restores under way."""
    replica = Replica(
        LIMITS, binding=binding, layers=LayerSegments(((0, 0), (1, 1), (2, 2), (3, 3)))
    )
    taken = replica.allocate(22)
    assert taken is not None
    assert replica.step().full_layers == ()
    # The units become free in an order that is none of the residual's.
    for unit in (None, 2, 0, 3, 1):
        replica.free([block for block in taken if block == unit])
    replica.now_s += LIMITS.min_fast_dwell_s
    return replica


def test_layers_come_back_one_after_the_other_under_either_binding() -> None:
    for binding in ("fixed", "any"):
        replica = returning(binding)
        tasks = replica.step().restore
        assert [task.segment for task in tasks] == [0, 1, 2, 3]
        for back, task in enumerate(tasks[:-1], 1):
            replica.finish(task)
            command = replica.step()
            assert command.mode is Mode.FAST
            assert command.full_layers == tuple(range(back))
            assert replica.manager.layers.count_full == back
        replica.finish(tasks[-1])
        command = replica.step()
        assert (command.mode, command.full_layers) == (Mode.FULL, ())
        assert replica.manager.layers.count_full == replica.manager.layers.count == 4


def test_a_layer_restored_on_one_rank_only_stays_fast() -> None:
    replica = returning()
    task = replica.step().restore[0]
    replica.ranks[0].finish(task)
    assert replica.step().full_layers == ()


def test_a_new_burst_makes_every_layer_fast_in_the_step_that_zeroes_the_unit() -> None:
    replica = returning()
    for task in replica.step().restore[:3]:
        replica.finish(task)
    assert replica.step().full_layers == (0, 1, 2)
    assert replica.allocate(10 + 4) is not None
    command = replica.step()
    assert sorted(command.zero) == [2, 3]
    assert command.full_layers == ()
    assert replica.manager.layers.count_full == 0


def test_layers_untouched_by_a_burst_are_fast_in_it_and_full_on_the_way_back() -> None:
    replica = Replica(LIMITS, layers=LayerSegments(((0, 1), (1, 2), (2, 3))))
    taken = replica.allocate(11)
    assert taken is not None
    assert replica.step().full_layers == ()
    assert replica.step().full_layers == (), "the burst goes on"
    replica.free(taken)
    assert replica.step().full_layers == (), "the dwell is not over"
    replica.now_s += LIMITS.min_fast_dwell_s
    assert replica.step().full_layers == (0, 1)


def test_a_pin_to_fast_mode_keeps_every_layer_fast() -> None:
    replica = returning()
    for task in replica.step().restore[:3]:
        replica.finish(task)
    replica.manager.set_pin(Pin.FAST)
    assert replica.step().full_layers == ()


def test_without_the_option_no_layer_returns_alone() -> None:
    replica = Replica(LIMITS)
    taken = replica.allocate(22)
    assert taken is not None
    replica.step()
    replica.free(taken)
    replica.now_s += LIMITS.min_fast_dwell_s
    replica.finish(replica.step().restore[0])
    assert replica.step().full_layers == ()
    assert replica.manager.layers.count == 0
