"""The mode-aware request router, in every process that sends requests to the LLM deployment."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakSet

import numpy as np
from pydantic import ValidationError

from dps_deployments.beside import beside
from dps_deployments.controller_client import (
    ControllerClient,
    ControllerUnavailableError,
    retries,
)
from dps_deployments.hints import from_stats
from dps_deployments.placing import Placing, placing_of
from dps_deployments.ray_adapter import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
    client_request_id,
    end_with,
    node_id,
    request_id,
    routing_stats,
    unplaced,
)
from dps_deployments.refusals import (
    RefusalError,
    no_replica,
    precision_unavailable,
)
from dps_deployments.requests import leave_wait
from dps_ray.fleet.admission import DrainRate, retry_after_s
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.routing import Peer
from dps_ray.fleet.view import FleetView
from dps_ray.modes import Floor

LISTEN_S = 10.0
REPORT_PERIOD_S = 1.0
RETRY_PERIOD_S = 0.5
GIVE_UP_PERIOD_S = 0.25
"""How often requests that wait for a first replica are looked at."""
RANKS = 16
"""Replicas offered to one request at a time."""

logger = logging.getLogger("ray.serve")


class DpsRouter(RequestRouter):
    """Routes by the fleet's policy on the controller's publications.

    Serve takes the least busy replica within a rank and moves to the next rank only when a whole
    rank refuses; the policy's order wins because every rank holds one replica.
    """

    # Serve passes over a replica whose queue length it does not know and that does not answer in
    # time. The default of 0.1 s would turn a replica that is merely busy into a refusal, and send
    # its requests to one that is restoring.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, controller_app: str, revision: str) -> None:
        """Receive ``request_router_kwargs``.

        Parameters
        ----------
        controller_app
            Application the fleet controller is deployed in.
        revision
            Version of this code. Serve keeps a router class until the kwargs differ, so that new
            code without a new revision would go on running the old class.
        """
        self._view = FleetView(np.random.default_rng(), node_id())
        self._reporter = ControllerClient(controller_app, caller=f"reporter of {self.app_name}")
        self._client = ControllerClient(
            controller_app, caller=f"router of {self.app_name} ({revision})"
        )
        self._pauses = retries()
        self._held: WeakSet[Placing] = WeakSet()
        self._drain = DrainRate()
        self._router_id = uuid.uuid4().hex[:12]
        self._tasks: list[asyncio.Task[None]] = []
        self._by_id: dict[str, RunningReplica] = {}
        self._dead: set[ReplicaID] = set()
        """Found dead, and not yet withdrawn by Serve."""
        self._report_due = asyncio.Event()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over Serve's replica set; the first call starts listening to the controller.

        Serve names a dead replica until its health checks have failed. No replica returns from
        death: the next one has another id.
        """
        self._dead &= {replica.replica_id for replica in replicas}
        replicas = [replica for replica in replicas if replica.replica_id not in self._dead]
        super().update_replicas(replicas)
        self._offer(replicas)
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._forever(turn))
                for turn in (self._listen, self._report, self._give_up)
            ]

    def _offer(self, replicas: list[RunningReplica]) -> None:
        """Let the view choose among these replicas."""
        before = self._by_id.keys()
        self._by_id = {replica.replica_id.unique_id: replica for replica in replicas}
        if self._by_id.keys() != before:
            self._report_due.set()
        peers = [
            Peer(
                replica_id=replica.replica_id.unique_id,
                node_id=replica.node_id,
                hint=from_stats(routing_stats(replica)),
            )
            for replica in replicas
        ]
        self._view.offer(peers, time.monotonic())
        beside(self.app_name).serves_full = self._view.serves_full
        beside(self.app_name).places = sum(replica.max_ongoing_requests for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call has found the replica's process dead: offer it no longer.

        Serve's controller notices later. Until then the dead replica, which fails fast and so has
        the shortest queue, would be tried first for every request.
        """
        known = replica_id in self.curr_replicas
        self._dead.add(replica_id)
        super().on_replica_actor_died(replica_id)
        if known:
            self._offer(list(self.curr_replicas.values()))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the best replicas, one per rank, most wanted first.

        Serve calls again after a pause when all of them refuse; by then the refusals count.
        """
        now_s = time.monotonic()
        if pending_request is None:
            order = self._view.decide(now_s, limit=RANKS).order
            return [[self._by_id[replica_id]] for replica_id in order]
        if pending_request.future.done():
            return self._released()
        try:
            placing = placing_of(pending_request)
        except RefusalError as error:
            return self._refuse(pending_request, error)
        ask = placing.ask
        name = request_id(pending_request)
        decision = self._view.decide(
            now_s, ask, limit=RANKS, request_id=client_request_id(pending_request)
        )
        insists = ask.floor is Floor.FULL
        # One that insists waits no longer for a place in full mode than for the mode itself.
        if not decision.order or (insists and placing.offered):
            refusal = self._overdue(pending_request, placing, now_s)
            if refusal is not None:
                return self._refuse(pending_request, refusal)
        if decision.order:
            self._view.pick(name, decision.order[0], now_s)
            placing.offered = True
            if insists:
                waited_s = time.time() - pending_request.created_at
                longest_s = placing.longest_wait_s(self._view.admission)
                leave_wait(pending_request.args[0], longest_s - waited_s)
        if insists or not decision.order:
            self._held.add(placing)
        else:
            self._held.discard(placing)
        # The best replicas have been offered: trying again at once would change nothing.
        pending_request.routing_context.should_backoff = True
        return [[self._by_id[replica_id]] for replica_id in decision.order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica has accepted the request."""
        now_s = time.monotonic()
        # Acceptances are what empties the queue. Ends would count refusals of full replicas too.
        self._drain.note(now_s)
        placing = placing_of(pending_request)
        self._held.discard(placing)
        name = request_id(pending_request)
        self._view.accept(name, replica_id.unique_id, now_s, placing.ask)
        self._view.tally.accepted(client_request_id(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The request has left the replica: answered, failed, cancelled or refused."""
        self._view.finish(internal_request_id, replica_id.unique_id, time.monotonic())

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """A replica has said how many requests it has."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        now_s = time.monotonic()
        self._view.note_queue_len(replica_id.unique_id, num_ongoing_requests, now_s)

    @property
    def max_num_routing_tasks(self) -> int:
        """Serve places a few requests at a time; those that wait for a mode must not count.

        Otherwise a few requests that insist on full precision would hold up all others.
        """
        return int(super().max_num_routing_tasks) + len(self._held)

    def _overdue(
        self, pending_request: PendingRequest, placing: Placing, now_s: float
    ) -> RefusalError | None:
        """The refusal of a request that no replica can serve now and that may wait no longer."""
        options = self._view.admission
        waited_s = time.time() - pending_request.created_at
        if waited_s < placing.longest_wait_s(options):
            return None
        later_s = retry_after_s(options, self.num_pending_requests, self._drain.per_s(now_s))
        refusal = precision_unavailable if placing.ask.floor is Floor.FULL else no_replica
        return refusal(waited_s, later_s)

    def _refuse(
        self, pending_request: PendingRequest, error: Exception
    ) -> list[list[RunningReplica]]:
        """End a request with an error."""
        end_with(self, pending_request, error)
        return self._released()

    def _released(self) -> list[list[RunningReplica]]:
        """Serve looks whether a request has ended only once it is offered a replica."""
        return [[next(iter(self._by_id.values()))]]

    async def _give_up(self) -> None:
        """End the requests that have waited long enough for a first replica.

        Serve asks a router only while it has a replica to offer.
        """
        await asyncio.sleep(GIVE_UP_PERIOD_S)
        if self.curr_replicas:
            return
        for pending_request in unplaced(self):
            error: RefusalError | None
            try:
                placing = placing_of(pending_request)
                error = self._overdue(pending_request, placing, time.monotonic())
            except RefusalError as refusal:
                error = refusal
            if error is not None:
                end_with(self, pending_request, error)

    async def _forever(self, turn: Callable[[], Awaitable[None]]) -> None:
        """A router that stopped listening or reporting would go on with an old picture."""
        while True:
            try:
                await turn()
            except Exception:
                logger.exception("router of %s: trying again", self.app_name)
                await asyncio.sleep(RETRY_PERIOD_S)

    async def _listen(self) -> None:
        try:
            answer = await self._client.listen(self._view.version, LISTEN_S)
            self._pauses.succeeded()
            if answer is not None:
                self._view.merge(Publication.model_validate(answer), time.monotonic())
                beside(self.app_name).admission = self._view.admission
                beside(self.app_name).serves_full = self._view.serves_full
        except ControllerUnavailableError:
            await asyncio.sleep(self._pauses.failed())
        except ValidationError as error:
            logger.error("publication of another release is not understood: %s", error)
            await asyncio.sleep(LISTEN_S)

    async def _report(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._report_due.wait(), REPORT_PERIOD_S)
        self._report_due.clear()
        # An outage is the listener's to notice and to log.
        with contextlib.suppress(ControllerUnavailableError):
            report = self._view.report(self._router_id, self.app_name)
            wanted = await self._reporter.report_router(report.model_dump(mode="json"))
            if self._view.tally.look_up(wanted):
                self._report_due.set()
