"""What one replica says about itself: the record it pushes to the controller.

A value that is not known is ``None``. It is never 0: a replica that does not know its queue must
not look like an idle one.
"""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, computed_field

from dps_ray.fleet.orders import Orders
from dps_ray.modes import Mode, Pin
from dps_ray.status import EngineStatus

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Health(StrEnum):
    """Where a replica stands in its life."""

    STARTING = "starting"
    """The engine is not up yet."""
    READY = "ready"
    DRAINING = "draining"
    """Leaving: it finishes what it has and must get nothing new."""
    DEAD = "dead"
    """The engine has failed. Final: the same replica never comes back."""


class Source(StrEnum):
    """Who measured the figures of a state."""

    ENGINE = "engine"
    """The status page of an elastic engine."""
    SERVER = "server"
    """The replica's server alone: the engine is not elastic, or not up yet."""


class ReplicaState(BaseModel):
    """One reading of one replica. Counters are totals since its engine started.

    Unknown keys are ignored, so that a newer replica can report to an older controller while a
    fleet is being upgraded.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    replica_id: str
    """Unique among all replicas that ever lived; a restarted replica gets a new one."""
    sequence: Count
    """Grows by one with every report of this replica."""
    sent_at_s: float
    """Wall clock of the sender, seconds since the epoch. For people: ages are never derived from
    it, because clocks of different nodes differ."""
    measured_ago_s: Seconds = 0.0
    """How old the figures were when the report was sent, on the sender's clock, seconds. It grows
    while an engine that has work publishes nothing new; an idle engine's page stays true."""
    source: Source
    code_version: str
    node_id: str | None = None
    deployment: str | None = None
    """Application and deployment the replica belongs to, ``app#deployment``."""
    health: Health

    mode: Mode | None = None
    pin: Pin | None = None
    restoring: bool | None = None
    """Residual bytes are on their way back."""
    restore_progress: Share | None = None
    """Share of residual bytes in place."""
    layers: Count | None = None
    """Layers that return to full precision one by one; 0 where all return at once."""
    layers_full: Count | None = None
    """Those of them that the latest step ran in full precision."""
    wants_restore: bool | None = None
    """Demand would let residual bytes return now."""
    has_lease: bool | None = None
    """The replica holds a valid restore lease."""
    may_go_fast: bool | None = None
    """The fleet's precision budget lets the replica leave full mode."""
    full_requests: Count | None = None
    """Requests on the replica that insist on full precision."""

    used_blocks: Count | None = None
    """KV blocks held by live requests."""
    free_blocks: Count | None = None
    """Free without lending anything more."""
    headroom_blocks: Count | None = None
    """Free blocks plus those that lendable weight memory could give."""
    base_blocks: Count | None = None
    total_blocks: Count | None = None
    """Base and elastic blocks together."""

    running: Count | None = None
    waiting: Count | None = None
    preemptions: Count | None = None
    tokens_full: Count | None = None
    tokens_fast: Count | None = None
    switches_to_fast: Count | None = None
    switches_to_full: Count | None = None
    restored_bytes: Count | None = None
    restore_busy_s: Seconds | None = None
    last_restore_s: Seconds | None = None
    orders: Orders = Orders()
    """The operator's orders as the replica last heard them."""
    fault: str | None = None
    """Why the replica cannot return to full mode, or why its engine died."""

    @property
    def application(self) -> str | None:
        """Application the replica belongs to."""
        return self.deployment.partition("#")[0] if self.deployment is not None else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def kv_usage(self) -> float | None:
        """Share of the KV blocks the replica has at this moment that live requests hold."""
        if self.used_blocks is None or self.free_blocks is None:
            return None
        at_hand = self.used_blocks + self.free_blocks
        return self.used_blocks / at_hand if at_hand else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def headroom_share(self) -> float | None:
        """Headroom as a share of all KV blocks, base and elastic."""
        if self.headroom_blocks is None or not self.total_blocks:
            return None
        return self.headroom_blocks / self.total_blocks

    @computed_field  # type: ignore[prop-decorator]
    @property
    def switches(self) -> int | None:
        """Changes of mode in either direction."""
        if self.switches_to_fast is None or self.switches_to_full is None:
            return None
        return self.switches_to_fast + self.switches_to_full

    @classmethod
    def from_engine(
        cls,
        status: EngineStatus,
        *,
        replica_id: str,
        sequence: int,
        sent_at_s: float,
        measured_ago_s: float,
        code_version: str,
        health: Health,
        node_id: str | None = None,
        deployment: str | None = None,
        has_lease: bool | None = None,
        may_go_fast: bool | None = None,
        orders: Orders | None = None,
    ) -> Self:
        """Build the state of an elastic engine from one reading of its status page."""
        return cls(
            replica_id=replica_id,
            sequence=sequence,
            sent_at_s=sent_at_s,
            measured_ago_s=measured_ago_s,
            source=Source.ENGINE,
            code_version=code_version,
            node_id=node_id,
            deployment=deployment,
            health=health,
            mode=status.mode,
            pin=status.pin,
            restoring=status.restoring,
            restore_progress=status.restore_progress,
            layers=status.layers,
            layers_full=status.layers_full,
            wants_restore=status.wants_restore,
            has_lease=has_lease,
            may_go_fast=may_go_fast,
            orders=orders or Orders(),
            full_requests=status.full_requests,
            used_blocks=status.used_blocks,
            free_blocks=status.free_blocks,
            headroom_blocks=status.headroom_blocks,
            base_blocks=status.base_blocks,
            total_blocks=status.total_blocks,
            running=status.running,
            waiting=status.waiting,
            preemptions=status.preemptions,
            tokens_full=status.tokens_full,
            tokens_fast=status.tokens_fast,
            switches_to_fast=status.switches_to_fast,
            switches_to_full=status.switches_to_full,
            restored_bytes=status.restored_bytes,
            restore_busy_s=status.restore_busy_s,
            last_restore_s=status.last_restore_s,
            fault=status.fault,
        )
