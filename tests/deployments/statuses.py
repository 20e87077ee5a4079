"""Engine statuses that several tests publish."""

from dataclasses import replace

from dps_ray.modes import Mode, Pin
from dps_ray.status import EngineStatus

IDLE = EngineStatus(
    sequence=1,
    time_s=0.0,
    mode=Mode.FULL,
    pin=Pin.AUTO,
    restoring=False,
    base_blocks=40,
    total_blocks=100,
    used_blocks=0,
    free_blocks=40,
    headroom_blocks=100,
    units=6,
    units_backed=6,
    units_kv=0,
    units_restoring=0,
    restore_progress=1.0,
    running=0,
    waiting=0,
    preemptions=0,
    tokens_full=0,
    tokens_fast=0,
    switches_to_fast=0,
    switches_to_full=0,
    restored_bytes=0,
    restore_busy_s=0.0,
    resumed_bytes=0,
    restores_cancelled=0,
    restores_failed=0,
    blocks_moved=0,
    prefixes_saved=0,
    backup_bytes=0,
    last_restore_s=None,
    fault=None,
)
RESTORING = replace(IDLE, mode=Mode.FAST, restoring=True, restore_progress=0.5)
LENT = replace(IDLE, mode=Mode.FAST, restore_progress=0.0, wants_restore=True)
"""Weight memory is lent, and demand would let it return."""
