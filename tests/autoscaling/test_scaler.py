"""The pure scaler: bounds, steps, holds, and no flapping whatever the load does."""

from dataclasses import replace
from random import Random

import pytest
from dps_autoscaling.scaler import (
    Decision,
    FleetLoad,
    Memory,
    Reason,
    ReplicaLoad,
    Scaler,
    ScalingOptions,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

OPTIONS = ScalingOptions(calm_s=100.0, idle_s=200.0)
IDLE = ReplicaLoad(pressure=0.0, fast_share=0.0, waiting=0.0, restoring=False, full_requests=0)
BUSY = replace(IDLE, pressure=0.6)


def fleet(
    *replicas: ReplicaLoad | None,
    target: int | None = None,
    requests: float = 0.0,
    queued: float = 0.0,
    minimum: int = 0,
    maximum: int = 10,
) -> FleetLoad:
    target = len(replicas) if target is None else target
    return FleetLoad(replicas, target, minimum, maximum, requests, queued, target_requests=50)


def decide(load: FleetLoad) -> Decision:
    """Decide at 1,000 s on a load that has lasted for ever."""
    return Scaler(OPTIONS).decide(load, Memory(load.target, 0.0, 0.0), 1000.0)


def settled(scaler: Scaler, size: int, pressure: float, requests: float) -> list[int]:
    """Sizes over two hours under a constant demand (in replicas' worth), each obeyed at once."""
    memory, sizes = Memory(), [size]
    for second in range(0, 7200, 25):
        each = replace(IDLE, pressure=pressure / sizes[-1] if sizes[-1] else None)
        load = fleet(*[each] * sizes[-1], requests=requests)
        decision = scaler.decide(load, memory, float(second))
        memory = decision.memory
        if decision.replicas != sizes[-1]:
            sizes.append(decision.replicas)
    return sizes


@settings(deadline=None)
@given(size=st.integers(1, 10), pressure=st.floats(0.001, 9.0), requests=st.floats(0.5, 600.0))
def test_constant_demand_ends_in_a_constant_size_reached_from_one_side(
    size: int, pressure: float, requests: float
) -> None:
    sizes = settled(Scaler(OPTIONS), size, pressure, requests)
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))


def any_load(rng: Random) -> ReplicaLoad | None:
    """Anything a replica may have said, or nothing."""

    def known(value: float) -> float | None:
        return value if rng.random() < 0.8 else None

    if rng.random() < 0.1:
        return None
    return ReplicaLoad(
        pressure=known(rng.uniform(0.0, 2.0)),
        fast_share=known(rng.random() ** 4),
        waiting=known(rng.choice([0.0, 0.0, rng.uniform(0.0, 20.0)])),
        restoring=rng.random() < 0.2,
        full_requests=rng.choice([0, 0, 0, 1]),
    )


def calm_load(rng: Random) -> ReplicaLoad:
    return replace(IDLE, restoring=rng.random() < 0.1, full_requests=int(rng.random() < 0.1))


@settings(deadline=None)
@given(rng=st.integers(0, 1 << 32).map(Random), minimum=st.integers(0, 3))
def test_whatever_the_load_does_steps_are_bounded_and_never_down_too_soon(
    rng: Random, minimum: int
) -> None:
    scaler, memory, maximum = Scaler(OPTIONS), Memory(), 8
    target = running = minimum
    now_s, resized_at_s, calm = 0.0, -1e9, False
    for _ in range(150):
        now_s += rng.uniform(1.0, 40.0)
        calm = calm if rng.random() < 0.93 else not calm
        running = target if rng.random() < 0.8 else min(running, target)
        replicas = [calm_load(rng) if calm else any_load(rng) for _ in range(running)]
        load = fleet(
            *replicas,
            target=target,
            requests=0.0 if calm else rng.uniform(0.0, 400.0),
            minimum=minimum,
            maximum=maximum,
        )
        decision = scaler.decide(load, memory, now_s)
        memory = decision.memory
        assert minimum <= decision.replicas <= maximum
        assert decision.replicas <= max(target, running + OPTIONS.max_step_up)
        if decision.replicas < target:
            assert target - decision.replicas <= OPTIONS.max_step_down
            assert now_s - resized_at_s >= OPTIONS.calm_s
            assert running == target
            assert None not in replicas
            assert not any(one.must_stay for one in replicas if one is not None)
        if decision.replicas != target:
            target, resized_at_s = decision.replicas, now_s


def test_fleet_shrinks_only_after_it_was_calm_for_the_whole_window() -> None:
    scaler, memory = Scaler(OPTIONS), Memory()
    for second, wanted in ((0, 3), (50, 3), (99, 3), (100, 2)):
        decision = scaler.decide(fleet(IDLE, IDLE, IDLE), memory, float(second))
        memory = decision.memory
        assert decision.replicas == wanted
    pressed = scaler.decide(fleet(BUSY, BUSY, BUSY), memory, 101.0)
    assert scaler.decide(fleet(IDLE, IDLE, IDLE), pressed.memory, 102.0).replicas == 3


@pytest.mark.parametrize(
    "stays", [replace(IDLE, restoring=True), replace(IDLE, full_requests=1)], ids=str
)
def test_replica_that_must_stay_postpones_a_step_down_without_losing_the_wait(
    stays: ReplicaLoad,
) -> None:
    held = decide(fleet(IDLE, stays, IDLE))
    assert (held.replicas, held.reason) == (3, Reason.HELD)
    freed = Scaler(OPTIONS).decide(fleet(IDLE, IDLE, IDLE), held.memory, 1001.0)
    assert (freed.replicas, freed.reason) == (2, Reason.CALM)
    assert decide(fleet(stays)).replicas == 1


def test_silent_replica_forbids_a_step_down() -> None:
    assert decide(fleet(IDLE, None, IDLE)).replicas == 3


def test_pressure_grows_the_fleet_by_no_more_than_the_step() -> None:
    pressed = replace(IDLE, pressure=2.0)
    found = decide(fleet(pressed, pressed))
    assert (found.replicas, found.reason) == (2 + OPTIONS.max_step_up, Reason.DEMAND)


def test_replicas_that_still_start_count_against_the_step() -> None:
    pressed = replace(IDLE, pressure=3.0)
    assert decide(fleet(pressed, pressed, target=4)).replicas == 4


def test_lasting_fast_mode_counts_as_demand_though_memory_suffices() -> None:
    fast = replace(BUSY, fast_share=0.5)
    found = decide(fleet(fast, fast))
    assert (found.replicas, found.reason) == (3, Reason.FAST)
    assert decide(fleet(BUSY, BUSY)).replicas == 2


def test_waiting_requests_grow_a_fleet_that_knows_no_pressure() -> None:
    found = decide(fleet(ReplicaLoad(), ReplicaLoad(), queued=20.0))
    assert (found.replicas, found.reason) == (3, Reason.WAITING)


def test_many_requests_grow_a_fleet_whose_replicas_have_not_reported() -> None:
    assert decide(fleet(None, None, requests=200.0)).replicas == 4


def test_zero_is_left_for_a_request_and_reached_when_idle() -> None:
    assert decide(fleet(target=0)).replicas == 0
    assert decide(fleet(target=0, requests=1.0)).replicas == 1
    assert decide(fleet(IDLE)).replicas == 0
    assert decide(fleet(IDLE, minimum=1)).replicas == 1
    assert decide(fleet(IDLE, requests=0.1)).replicas == 1


def test_last_replica_stays_until_it_was_idle_for_long() -> None:
    memory = Memory(1, None, 0.0)
    assert Scaler(OPTIONS).decide(fleet(IDLE), memory, 199.0).replicas == 1
    assert Scaler(OPTIONS).decide(fleet(IDLE), memory, 200.0).replicas == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low_fast_share": 0.4}, "low_fast_share"),
        ({"low_waiting": 9}, "low_waiting"),
        ({"shrink_below": 1.0}, "shrink_below"),
        ({"grow_above": 1.0}, "grow_above"),
    ],
)
def test_thresholds_without_a_gap_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScalingOptions(**options)
