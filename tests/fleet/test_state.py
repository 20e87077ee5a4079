"""The record a replica pushes."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.modes import Mode, Pin
from dps_ray.status import EngineStatus

from .builders import replica_state

STATUS = EngineStatus(
    sequence=9,
    time_s=5.0,
    mode=Mode.FAST,
    pin=Pin.AUTO,
    restoring=True,
    base_blocks=40,
    total_blocks=100,
    used_blocks=30,
    free_blocks=20,
    headroom_blocks=60,
    units=6,
    units_backed=2,
    units_kv=3,
    units_restoring=1,
    restore_progress=0.5,
    running=3,
    waiting=1,
    preemptions=2,
    tokens_full=1000,
    tokens_fast=200,
    switches_to_fast=4,
    switches_to_full=3,
    restored_bytes=12345,
    restore_busy_s=0.5,
    resumed_bytes=77,
    restores_cancelled=1,
    restores_failed=0,
    blocks_moved=0,
    prefixes_saved=0,
    backup_bytes=1 << 20,
    last_restore_s=None,
    fault=None,
    wants_restore=True,
    full_requests=2,
    layers=12,
    layers_full=5,
)


def from_status(status: EngineStatus) -> ReplicaState:
    return ReplicaState.from_engine(
        status,
        replica_id="a",
        sequence=1,
        sent_at_s=6.0,
        measured_ago_s=0.0,
        code_version="1",
        health=Health.READY,
    )


def test_state_carries_every_figure_it_shares_with_the_engine_status() -> None:
    state = from_status(STATUS)
    shared = {field.name for field in fields(EngineStatus)} & set(ReplicaState.model_fields)
    assert len(shared - {"sequence"}) == 24
    for name in shared - {"sequence"}:
        assert getattr(state, name) == getattr(STATUS, name), name
    assert state.source is Source.ENGINE


def test_derived_shares_count_the_blocks_at_hand_and_all_blocks() -> None:
    state = from_status(STATUS)
    assert state.kv_usage == pytest.approx(30 / 50)
    assert state.headroom_share == pytest.approx(60 / 100)
    assert state.switches == 7


def test_unknown_figures_stay_unknown() -> None:
    state = ReplicaState(
        replica_id="a",
        sequence=0,
        sent_at_s=0.0,
        source=Source.SERVER,
        code_version="1",
        health=Health.READY,
    )
    assert state.kv_usage is None
    assert state.headroom_share is None
    assert state.switches is None
    assert state.running is None


def test_state_survives_the_wire_and_ignores_fields_of_a_newer_sender() -> None:
    state = replica_state(mode=Mode.FAST, restore_progress=0.25)
    wire = {**state.model_dump(mode="json"), "field_of_the_future": 1}
    assert ReplicaState.model_validate(wire) == state


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValidationError, match="running"):
        replica_state(running=-1)
