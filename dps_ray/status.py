"""What an engine tells the outside world about itself, as one immutable record."""

from dataclasses import dataclass

from dps_ray.modes import Mode, Pin


@dataclass(frozen=True)
class EngineStatus:
    """One consistent reading of an engine's status page.

    Counters are totals since the engine started. ``None`` means not known yet, never zero.
    """

    sequence: int
    """Grows by one with every publication."""
    time_s: float
    """Wall-clock time of the publication, seconds since the epoch."""
    mode: Mode
    pin: Pin
    restoring: bool
    """Residual bytes are on their way back; not so while a burst holds them up."""
    base_blocks: int
    total_blocks: int
    """Base and elastic KV blocks together."""
    used_blocks: int
    """Blocks held by live requests."""
    free_blocks: int
    """Free without lending anything more."""
    headroom_blocks: int
    """``free_blocks`` plus the blocks that lendable units could give."""
    units: int
    units_backed: int
    """Units that hold their residual segment."""
    units_kv: int
    """Units lent to the KV cache."""
    units_restoring: int
    restore_progress: float | None
    """Share of residual bytes in place, 0 to 1; ``None`` in a static engine."""
    running: int
    waiting: int
    preemptions: int
    tokens_full: int
    """Tokens sampled by full-mode passes."""
    tokens_fast: int
    switches_to_fast: int
    switches_to_full: int
    restored_bytes: int
    restore_busy_s: float
    """Time spent copying residual bytes, seconds."""
    resumed_bytes: int
    """Residual bytes that were in place when a restore went on after a burst: not copied again."""
    restores_cancelled: int
    restores_failed: int
    """Restores that some rank could not complete; each is tried again, within limits."""
    blocks_moved: int
    """Live KV blocks moved out of lent units, so that those could be restored."""
    prefixes_saved: int
    """Cached prefix blocks moved out of units before those were restored."""
    backup_bytes: int
    """Host memory that the ranks' residual backups take, bytes; pinned for a GPU."""
    last_restore_s: float | None
    """Duration of the latest complete return to full mode (first restore to mode flip), seconds."""
    fault: str | None
    """Why the engine cannot return to full mode, or ``None``."""
    wants_restore: bool = False
    """Demand would let residual bytes return now."""
    full_requests: int = 0
    """Requests on the replica, running or waiting, that insist on full precision."""
    layers: int = 0
    """Layers that return to full precision one by one; 0 where all return at once."""
    layers_full: int = 0
    """Those of them that the latest step ran in full precision."""
    tokens_mixed: int = 0
    """The part of ``tokens_fast`` that fast steps with some full layers have made."""
    full_request_tokens: int = 0
    """Most tokens, prompt and output together, of a request that insists on full precision."""
    restore_left_s: float | None = None
    """How long the return of all residual bytes will still take at the pace so far, seconds."""
    restore_bytes_per_s: float = 0.0
    """How fast each rank's latest segment came back, copied and verified, bytes per second summed
    over the ranks; 0 before the first."""
