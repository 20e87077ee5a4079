"""Restore leases: who may bring its residual back now, so that replicas do not all do it at once.

A restore takes host-link bandwidth and keeps new work away from its replica. The book is the
controller's side; ``LeaseHolder`` of ``lease_holder`` is the replica's.

Why there are never more valid leases than the limit: a lease runs, on the replica's clock, from the
moment the report was *sent* that it answers, and on the controller's from the moment that report
*arrived*, so the replica's ends first. A new controller grants nothing for one lease time, in which
every lease of its predecessor has been reported or has run out. A lease that is revoked keeps its
place until it would have run out: the answer that says so may be lost. The replica that hears it
ends a restore that runs, except where the lease merely was not granted; see ``Refusal.stops``.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dps_ray.fleet.figures import FleetFigures
from dps_ray.fleet.shares import share_of
from dps_ray.fleet.state import Health, ReplicaState, Share


class LeaseOptions(BaseModel):
    """How many replicas may restore at once, and when nobody may begin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    """``false``: every replica restores when it likes."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Most leases at once. Default: ``max_share`` of the live replicas, never none."""
    max_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25
    max_per_node: Annotated[int, Field(ge=1)] = 2
    """Most leases on one node at once: its replicas share the links to host memory."""
    ttl_s: Annotated[float, Field(gt=0.0)] = 10.0
    """Life of a lease that is not renewed, seconds. Every report of its holder renews it."""
    min_headroom_share: Share = 0.05
    """Headroom of the other live replicas that do not restore, as a share of their KV memory, below
    which a replica's lease is revoked, a restore of its that runs ends, and none is granted: it
    would get no new work, and the others could not take it. The replica gets a lease again after
    the revoked one would have run out."""
    min_known_share: Share = 0.5
    """Share of the known replicas that must be live. Below it the controller is blind and grants
    nothing."""
    alone_after_s: Annotated[float, Field(gt=0.0)] | None = 60.0
    """A replica that has not reached the controller for so long restores without a lease, each at a
    moment of its own between this time and twice this time. ``null``: never; it stays in fast mode
    until a controller is back, and serves on meanwhile."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        alone_s = self.alone_after_s
        if self.enabled and alone_s is not None and alone_s <= self.ttl_s:
            raise ValueError(
                f"alone_after_s ({alone_s:g}) must be above ttl_s ({self.ttl_s:g}), or replicas "
                "restore without a lease while leases that were granted before are valid"
            )
        return self


class Refusal(StrEnum):
    """Why a replica that wants to restore may not."""

    BLIND = "blind"
    """The controller is new, or too few replicas are live."""
    PRESSURE = "pressure"
    """The others have no memory to spare."""
    LEAVING = "leaving"
    """The replica is draining or dead."""
    FULL = "full"
    """The fleet's leases are taken, or older wishes come first."""
    NODE = "node"
    """The node's leases are taken."""
    REVOKED = "revoked"
    """Its lease was revoked a moment ago, under pressure or by the operator."""

    @property
    def stops(self) -> bool:
        """Whether a restore that runs must end, and not only no new one begin."""
        return self in (Refusal.PRESSURE, Refusal.LEAVING, Refusal.REVOKED)


@dataclass(frozen=True, slots=True)
class Lease:
    """A permit of one replica."""

    replica_id: str
    node_id: str | None
    granted_at_s: float
    expires_at_s: float


class LeaseBook:
    """The leases of a fleet. Soft state: a new book learns them from the holders' reports.

    Parameters
    ----------
    options
        Limits; replace them with ``reconfigure``.
    clock
        Monotonic seconds.
    """

    def __init__(self, options: LeaseOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._started_at_s = clock()
        self._leases: dict[str, Lease] = {}
        self._ending: dict[str, Lease] = {}
        """Revoked leases whose holders may not have heard of it: they keep their places until they
        would have run out."""
        self._barred: dict[str, float] = {}
        """Replicas whose lease was revoked, and until when they get none."""
        self._untold: set[str] = set()
        """Replicas that the operator has barred and that have not reported since: their bars last
        until an answer has said so, or a restore that runs would not end."""
        self._wishes: dict[str, _Wish] = {}
        self._unleased: dict[str, float] = {}
        """Replicas that restore without a lease, and when that was last heard."""
        self.granted = 0
        """Leases granted since start; renewals do not count."""
        self.revoked = 0

    @property
    def options(self) -> LeaseOptions:
        return self._options

    def reconfigure(self, options: LeaseOptions) -> None:
        """Change the limits; more leases than a lower limit allows run out one by one."""
        self._options = options

    def leases(self) -> list[Lease]:
        """Leases that are valid now, oldest first."""
        self._expire()
        return sorted(self._leases.values(), key=lambda lease: lease.granted_at_s)

    def answer(self, state: ReplicaState, fleet: Callable[[], FleetFigures]) -> bool | Refusal:
        """Decide on one report.

        Parameters
        ----------
        state
            The report. It wants a lease while it ``wants_restore`` or is ``restoring``.
        fleet
            Figures of the fleet; asked for only when they matter.

        Returns
        -------
        bool or Refusal
            ``True``: a lease, new or renewed. ``False``: none wanted. Else why there is none.
        """
        self._expire()
        now_s, replica_id = self._clock(), state.replica_id
        if not (state.wants_restore or state.restoring):
            self.forget([replica_id])
            return False
        wish = self._wishes.get(replica_id)
        self._wishes[replica_id] = _Wish(wish.since_s if wish else now_s, now_s, state.node_id)
        refusal = self._objection(state, fleet(), now_s)
        if refusal is not None:
            revoked = self._revoke(replica_id)
            if revoked is not None:
                if state.health is Health.DEAD:
                    del self._ending[replica_id]
                elif refusal is Refusal.PRESSURE:
                    self._barred[replica_id] = revoked.expires_at_s
            if state.restoring:
                self._unleased[replica_id] = now_s
            if refusal.stops:
                self._untold.discard(replica_id)
            if refusal is Refusal.LEAVING:
                # It will never get one, so its age must not hold up the others.
                del self._wishes[replica_id]
            return refusal
        known = self._leases.get(replica_id)
        self.granted += known is None
        self._unleased.pop(replica_id, None)
        self._ending.pop(replica_id, None)
        self._leases[replica_id] = Lease(
            replica_id=replica_id,
            node_id=state.node_id,
            granted_at_s=known.granted_at_s if known is not None else now_s,
            expires_at_s=now_s + self._options.ttl_s,
        )
        return True

    def revoke(self, replica_id: str, hold_s: float) -> bool:
        """Take a lease back at an operator's word, and give this replica none for ``hold_s``.

        The replica hears of it with the answer to its next report, and ends a restore that runs,
        also one that it began alone. ``False``: it has no lease and restores nothing.
        """
        self._expire()
        if self._revoke(replica_id) is None and replica_id not in self._unleased:
            return False
        self._barred[replica_id] = self._clock() + hold_s
        self._untold.add(replica_id)
        return True

    def forget(self, replica_ids: Iterable[str]) -> None:
        """Drop replicas that are gone or want nothing."""
        for replica_id in replica_ids:
            self._leases.pop(replica_id, None)
            self._ending.pop(replica_id, None)
            self._wishes.pop(replica_id, None)
            self._unleased.pop(replica_id, None)
            self._untold.discard(replica_id)

    def _revoke(self, replica_id: str) -> Lease | None:
        lease = self._leases.pop(replica_id, None)
        if lease is not None:
            self.revoked += 1
            self._ending[replica_id] = lease
        return lease

    def _objection(self, state: ReplicaState, fleet: FleetFigures, now_s: float) -> Refusal | None:
        options, replica_id = self._options, state.replica_id
        if state.health is not Health.READY:
            return Refusal.LEAVING
        if fleet.others_spare_less_than(options.min_headroom_share, replica_id):
            return Refusal.PRESSURE
        if replica_id in self._barred:
            return Refusal.REVOKED
        if replica_id in self._leases:
            return None
        if now_s < self._started_at_s + options.ttl_s:
            # A valid lease that this book does not know is its predecessor's.
            return None if state.has_lease else Refusal.BLIND
        if fleet.live < options.min_known_share * fleet.present:
            return Refusal.BLIND
        held = {**self._ending, **self._leases}
        held.pop(replica_id, None)
        free = self._limit(fleet) - len(held.keys() | self._unleased.keys() - {replica_id})
        taken = Counter(lease.node_id for lease in held.values())
        full_nodes = {
            node_id
            for node_id, count in taken.items()
            if node_id is not None and count >= options.max_per_node
        }
        since_s = self._wishes[replica_id].since_s
        older = sum(
            wish.since_s < since_s
            for other, wish in self._wishes.items()
            if other not in self._leases
            and other not in self._barred
            and wish.node_id not in full_nodes
        )
        if older >= free:
            return Refusal.FULL
        return Refusal.NODE if state.node_id in full_nodes else None

    def _limit(self, fleet: FleetFigures) -> int:
        if self._options.max_concurrent is not None:
            return self._options.max_concurrent
        return share_of(fleet.live, self._options.max_share)

    def _expire(self) -> None:
        now_s, ttl_s = self._clock(), self._options.ttl_s
        for leases in (self._leases, self._ending):
            for lease in [lease for lease in leases.values() if lease.expires_at_s <= now_s]:
                del leases[lease.replica_id]
        for replica_id in [r for r, wish in self._wishes.items() if now_s - wish.heard_s > ttl_s]:
            del self._wishes[replica_id]
        for replica_id in [r for r, until_s in self._barred.items() if until_s <= now_s]:
            if replica_id not in self._untold:
                del self._barred[replica_id]
        for replica_id in [r for r, at_s in self._unleased.items() if now_s - at_s > ttl_s]:
            del self._unleased[replica_id]


@dataclass(frozen=True, slots=True)
class _Wish:
    since_s: float
    heard_s: float
    node_id: str | None
