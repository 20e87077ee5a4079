"""Reads one replica's state: its engine's status page where there is one, and its health."""

import time
from collections.abc import Callable

from dps_deployments.ray_adapter import ReplicaIdentity
from dps_ray.fleet.permits import ReplicaPermits
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.modes import Mode
from dps_ray.status import EngineStatus


class ReplicaProbe:
    """State of this replica, on demand and without waiting for the engine.

    Death is latched: an engine that was seen dead stays dead, whatever later looks say.

    Parameters
    ----------
    identity, code_version
        Told in every state.
    permits
        What the fleet allows.
    is_stopping
        Whether Serve is stopping the replica.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        identity: ReplicaIdentity,
        code_version: str,
        permits: ReplicaPermits,
        is_stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._is_stopping = is_stopping
        self._identity = identity
        self._permits = permits
        self._code_version = code_version
        self._sequence = 0
        self._read_status: Callable[[], EngineStatus | None] | None = None
        self._engine_is_dead: Callable[[], bool] | None = None
        self._has_work: Callable[[], bool] = lambda: False
        self._cause_of_death: str | None = None
        self._page_sequence: int | None = None
        self._current_at_s = clock()

    @property
    def cause_of_death(self) -> str | None:
        """Why the engine is dead, or ``None`` while it is not."""
        return self._cause_of_death

    def engine_started(
        self,
        engine_is_dead: Callable[[], bool],
        read_status: Callable[[], EngineStatus | None] | None,
        has_work: Callable[[], bool],
    ) -> None:
        """Note that the engine is up.

        Parameters
        ----------
        engine_is_dead
            Cheap look at the engine client.
        read_status
            Reads the status page; ``None`` for an engine that is not elastic.
        has_work
            The engine owes somebody an answer, as far as its client knows.
        """
        self._has_work = has_work
        self._engine_is_dead = engine_is_dead
        self._read_status = read_status

    def latch_death(self, cause: str) -> None:
        """Declare the engine dead; the first cause is kept."""
        if self._cause_of_death is None:
            self._cause_of_death = cause

    def read(self) -> ReplicaState:
        """Take one reading under the next sequence number."""
        self._sequence += 1
        status = self._look()
        if status is None:
            return self._state_without_page()
        return ReplicaState.from_engine(
            status,
            replica_id=self._identity.replica_id,
            sequence=self._sequence,
            sent_at_s=time.time(),
            measured_ago_s=self._age_s(status),
            code_version=self._code_version,
            health=self._health(),
            node_id=self._identity.node_id,
            deployment=self._identity.deployment,
            has_lease=self._permits.has_lease(time.monotonic()),
            may_go_fast=self._permits.may_go_fast(time.monotonic()),
            orders=self._permits.orders,
        )

    def _look(self) -> EngineStatus | None:
        """Latest status of a living elastic engine; ``None`` for any other."""
        if self._cause_of_death is None and self._engine_is_dead is not None:
            if self._engine_is_dead():
                self.latch_death("the engine process has ended")
            elif self._read_status is not None:
                try:
                    return self._read_status()
                except RuntimeError as error:
                    self.latch_death(str(error))
        return None

    def _age_s(self, status: EngineStatus) -> float:
        """How old is what the page says: an engine with work publishes every 20 ms."""
        now_s = self._clock()
        if status.sequence != self._page_sequence or not self._has_work():
            self._page_sequence, self._current_at_s = status.sequence, now_s
        return now_s - self._current_at_s

    def _health(self) -> Health:
        if self._cause_of_death is not None:
            return Health.DEAD
        if self._is_stopping():
            return Health.DRAINING
        return Health.STARTING if self._engine_is_dead is None else Health.READY

    def _state_without_page(self) -> ReplicaState:
        up = self._engine_is_dead is not None and self._cause_of_death is None
        elastic = self._read_status is not None
        return ReplicaState(
            replica_id=self._identity.replica_id,
            sequence=self._sequence,
            sent_at_s=time.time(),
            source=Source.SERVER,
            code_version=self._code_version,
            node_id=self._identity.node_id,
            deployment=self._identity.deployment,
            health=self._health(),
            # An engine that is not elastic has one mode: its checkpoint's own precision.
            mode=Mode.FULL if up and not elastic else None,
            fault=self._cause_of_death,
            orders=self._permits.orders,
            may_go_fast=self._permits.may_go_fast(time.monotonic()) if elastic else False,
        )
