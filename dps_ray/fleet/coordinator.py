"""The controller's mind: what it knows of the fleet, and what it allows each replica."""

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.fleet.aggregate import FleetAggregate
from dps_ray.fleet.budget import PrecisionBudget
from dps_ray.fleet.figures import FleetFigures
from dps_ray.fleet.leases import LeaseBook, LeaseOptions, Refusal
from dps_ray.fleet.orders import Orders
from dps_ray.fleet.publication import ControllerOptions
from dps_ray.fleet.routers import RouterBook
from dps_ray.fleet.state import Health, ReplicaState
from dps_ray.fleet.table import Verdict
from dps_ray.modes import Pin

FIGURES_AGE_S = 0.25
"""Sums over the fleet are at most so old."""


class Reply(BaseModel):
    """The controller's answer to one report."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    verdict: Verdict
    lease: bool
    """The replica may begin to restore, for ``terms.ttl_s`` from when it sent the report."""
    refusal: Refusal | None = None
    """Why it may not although it wants to."""
    may_go_fast: bool
    terms: LeaseOptions
    admission: AdmissionOptions = AdmissionOptions()
    pin: Pin | None = None
    """The operator's pin; ``None``: the one the replica was started with."""
    orders: Orders = Orders()
    """All of the operator's orders, for the replica to keep and to report."""


class Coordinator:
    """Reports in; versions, leases and allowances out.

    Parameters
    ----------
    options
        Everything an operator can change; replace it with ``reconfigure``.
    clock
        Monotonic seconds.
    first_version
        See ``FleetAggregate``.
    """

    def __init__(
        self, options: ControllerOptions, clock: Callable[[], float], first_version: int = 0
    ) -> None:
        self.options = options
        self.aggregate = FleetAggregate(options.ageing, clock, first_version)
        self.book = LeaseBook(options.leases, clock)
        self.budget = PrecisionBudget(options.budget, clock)
        self.refusals: dict[str, Refusal] = {}
        """Latest refusal by replica that wants to restore."""
        self.routers = RouterBook(clock)
        self.orders = Orders()
        """What the operator has ordered by calls; see ``Orders``."""
        self._clock = clock
        self._started_at_s = clock()
        self._figures: FleetFigures | None = None
        self._figures_at_s = float("-inf")

    def reconfigure(self, options: ControllerOptions) -> None:
        """Change the options; routers and replicas get them with their next answer."""
        self.options = options
        self.book.reconfigure(options.leases)
        self.budget.reconfigure(options.budget)
        self.aggregate.reconfigure(options.ageing)

    def report(self, state: ReplicaState) -> Reply:
        """Take in one report and say what its replica may do.

        A replica that Serve is stopping says so. Where it cannot, that the routers are no longer
        offered it tells.
        """
        if state.health is Health.READY and self.routers.has_withdrawn(
            state.replica_id, state.application
        ):
            state = state.model_copy(update={"health": Health.DRAINING})
        if state.orders.revision > self.orders.revision:
            self.orders = state.orders
        verdict = self.aggregate.apply(state)
        lease: bool | Refusal = False
        allowed = False
        if verdict.accepted:
            if state.health is Health.DEAD:
                self._figures = None
            lease = self.book.answer(state, self.figures)
            allowed = self.budget.answer(state, self.figures().live)
        refusal = lease if isinstance(lease, Refusal) else None
        if refusal is not None:
            self.refusals[state.replica_id] = refusal
        else:
            self.refusals.pop(state.replica_id, None)
        return Reply(
            verdict=verdict,
            lease=lease is True,
            refusal=refusal,
            may_go_fast=allowed,
            terms=self.options.leases,
            admission=self.options.admission,
            pin=self.orders.pin_of(state.replica_id, self.options.pins),
            orders=self.orders,
        )

    def lose(self, replica_id: str) -> None:
        """Note that a replica's connection broke without a word: its process has most likely died.

        Its lease and its allowance last on: a replica that was merely cut off may still use them.
        """
        self.aggregate.lose(replica_id)
        self._figures = None

    def orders_known_in_s(self) -> float:
        """Time until every replica has told the orders it knows, seconds; 0 when it has.

        A change that is made earlier would outdate what an earlier controller was told.
        """
        known_at_s = self._started_at_s + self.options.ageing.stale_after_s
        return max(0.0, known_at_s - self._clock())

    def tick(self) -> None:
        """Do what is due; call it every ``publish_period_s``."""
        for state in self.aggregate.tick():
            replica_id = state.replica_id
            if self._is_gone(state):
                self.orders = self.orders.without(replica_id)
            self.book.forget([replica_id])
            self.budget.forget(replica_id)
            self.routers.forget(replica_id)
            self.refusals.pop(replica_id, None)

    def figures(self) -> FleetFigures:
        """Sums over the fleet."""
        now_s = self._clock()
        if self._figures is None or now_s - self._figures_at_s > FIGURES_AGE_S:
            self._figures = FleetFigures.of(self.aggregate.snapshot().entries)
            self._figures_at_s = now_s
        return self._figures

    def _is_gone(self, state: ReplicaState) -> bool:
        """Whether a replica that fell silent has ended: one that was merely cut off may return."""
        leaving = state.health in (Health.DEAD, Health.DRAINING)
        return leaving or self.routers.has_withdrawn(state.replica_id, state.application)
