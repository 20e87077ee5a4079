"""All candidates of one router as columns of numbers: one decision is a few array operations.

Most of a column changes only when a publication arrives; what changes with every request is
``open_requests`` alone. ``version`` tells the two apart: what is derived from the other columns
may be kept as long as it stays.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from dps_ray.fleet.routing import Hint, Peer
from dps_ray.fleet.snapshot import Entry, Standing
from dps_ray.fleet.tiers import FloatArray
from dps_ray.modes import Mode

BoolArray = NDArray[np.bool_]

UNKNOWN = float("nan")
NO_MODE, FULL, FAST = -1, 0, 1
_MODE_CODES = {None: NO_MODE, Mode.FULL: FULL, Mode.FAST: FAST}


class Columns:
    """One row for each replica that Serve offers, in Serve's order; ``nan`` is unknown.

    Parameters
    ----------
    peers
        The offered replicas.
    node_id
        Node of this router.
    """

    def __init__(self, peers: Sequence[Peer], node_id: str | None = None) -> None:
        count = len(peers)
        self.version = 0
        self.ids = tuple(peer.replica_id for peer in peers)
        self.index = {replica_id: row for row, replica_id in enumerate(self.ids)}
        self.local: BoolArray = np.array(
            [node_id is not None and peer.node_id == node_id for peer in peers], dtype=bool
        )
        self.identity = np.array([_identity(i) for i in self.ids], dtype=np.uint64)
        """A number of each replica, the same in every router."""

        self.gone: BoolArray = np.zeros(count, dtype=bool)
        """Dead or draining."""
        self.live: BoolArray = np.zeros(count, dtype=bool)
        self.mode = np.full(count, NO_MODE, dtype=np.int8)
        self.restoring: BoolArray = np.zeros(count, dtype=bool)
        self.reported: FloatArray = np.full(count, UNKNOWN)
        """Requests running and waiting when the state was measured."""
        self.waiting: FloatArray = np.full(count, UNKNOWN)
        self.request_blocks: FloatArray = np.full(count, UNKNOWN)
        """Mean KV blocks of a running request."""
        self.headroom_blocks: FloatArray = np.full(count, UNKNOWN)
        self.total_blocks: FloatArray = np.full(count, UNKNOWN)
        self.open_when_measured: FloatArray = np.zeros(count)
        """This router's open requests on the replica at the moment the state was measured."""

        self.queue_len: FloatArray = np.full(count, UNKNOWN)
        """Ongoing requests as Serve's router last heard."""
        self.queue_len_at_s: FloatArray = np.full(count, UNKNOWN)
        """When it heard them, on the router's clock."""
        self.open_requests: FloatArray = np.zeros(count)
        """Requests of this router that are on the replica now."""

    def __len__(self) -> int:
        return len(self.ids)

    def set_entry(self, entry: Entry, hint: Hint | None, open_when_measured: int) -> None:
        """Fill one replica's row from its state, or from Serve's hint where that is missing."""
        row = self.index[entry.replica_id]
        state = entry.state if entry.standing is Standing.LIVE else None
        self.version += 1
        self.live[row] = state is not None
        self.gone[row] = entry.standing in (Standing.DEAD, Standing.DRAINING) or (
            state is None and hint is not None and hint.dead
        )
        known = state if state is not None else hint
        self.mode[row] = _MODE_CODES[known.mode if known is not None else None]
        self.restoring[row] = bool(known.restoring) if known is not None else False
        self.open_when_measured[row] = open_when_measured
        if state is None:
            for column in (self.reported, self.waiting, self.request_blocks):
                column[row] = UNKNOWN
            self.headroom_blocks[row] = self.total_blocks[row] = UNKNOWN
            return
        counted = state.running is not None and state.waiting is not None
        self.reported[row] = (state.running or 0) + (state.waiting or 0) if counted else UNKNOWN
        self.waiting[row] = _number(state.waiting)
        sized = bool(state.running) and state.used_blocks is not None
        self.request_blocks[row] = (
            (state.used_blocks or 0) / (state.running or 1) if sized else UNKNOWN
        )
        self.headroom_blocks[row] = _number(state.headroom_blocks)
        self.total_blocks[row] = _number(state.total_blocks or None)

    def note_queue_len(self, row: int, queue_len: float, at_s: float) -> None:
        """Serve has heard a replica's number of ongoing requests."""
        self.queue_len[row], self.queue_len_at_s[row] = queue_len, at_s

    def forget_queue_lens(self, *, before_s: float) -> None:
        """What Serve heard before that moment is unknown from now on."""
        self.queue_len[self.queue_len_at_s < before_s] = UNKNOWN


def _number(value: int | None) -> float:
    return UNKNOWN if value is None else float(value)


def _identity(replica_id: str) -> int:
    return int.from_bytes(blake2b(replica_id.encode(), digest_size=8).digest())
