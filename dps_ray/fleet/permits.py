"""What a replica may do at this moment, from what the controller last said."""

from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.fleet.coordinator import Reply
from dps_ray.fleet.lease_holder import LeaseHolder
from dps_ray.fleet.leases import LeaseOptions
from dps_ray.fleet.orders import Orders
from dps_ray.fleet.state import ReplicaState
from dps_ray.modes import Pin


class ReplicaPermits:
    """A replica's lease and allowance. Every ``now_s`` is monotonic seconds of one clock.

    Until a controller has answered for the first time a replica neither restores nor goes fast on
    its own, unless it has to wait so long that it goes alone; see ``LeaseOptions.alone_after_s``.
    """

    def __init__(self, replica_id: str, now_s: float) -> None:
        self._holder = LeaseHolder(replica_id, LeaseOptions(), now_s)
        self._may_go_fast: bool | None = None
        self._stopped = False
        self.pin: Pin | None = None
        """The operator's pin; ``None``: the one the replica was started with."""
        self.orders = Orders()
        """The operator's latest orders, for a controller that does not know them."""
        self.admission = AdmissionOptions()
        """The operator's bounds on waiting."""

    def has_lease(self, now_s: float) -> bool:
        """Whether a restore lease is valid now."""
        return self._holder.has_lease(now_s)

    def may_go_fast(self, now_s: float) -> bool:
        """Whether the replica may leave full mode. The latest answer counts until the next."""
        if self._may_go_fast is None:
            return self._holder.is_alone(now_s)
        return self._may_go_fast

    def restore_until_s(self, now_s: float) -> float | None:
        """Restores may begin until then; ``None`` for any time."""
        return self._holder.restore_until_s(now_s)

    def must_stop_restores(self, now_s: float) -> bool:
        """Whether a restore that runs has to end. A replica that decides alone goes on."""
        return self._stopped and self._holder.restore_until_s(now_s) is not None

    def sending(self, state: ReplicaState, now_s: float) -> bool:
        """Note that a report goes out; whether it gives a lease back that is valid now."""
        wanted = bool(state.wants_restore or state.restoring)
        gives_back = not wanted and self.has_lease(now_s)
        self._holder.reporting(wanted, now_s)
        return gives_back

    def answered(self, reply: Reply, sent_at_s: float) -> None:
        """Take in the answer to the report that was sent at ``sent_at_s``."""
        if reply.verdict.accepted:
            self._holder.answered(reply.terms, reply.lease, sent_at_s)
            self._stopped = reply.refusal is not None and reply.refusal.stops
            self._may_go_fast = reply.may_go_fast
            self.pin = reply.pin
            self.orders = reply.orders
            self.admission = reply.admission
