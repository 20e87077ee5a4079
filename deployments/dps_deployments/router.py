"""The mode-aware request router, in every process that sends requests to the LLM deployment."""

import asyncio
import logging
import random
import time
from typing import Any

from pydantic import ValidationError

from dps_deployments.controller_client import (
    RETRY_PERIOD_S,
    ControllerClient,
    ControllerUnavailableError,
)
from dps_deployments.hints import from_stats
from dps_deployments.ray_adapter import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
    request_id,
    routing_stats,
)
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.view import FleetView, Peer

LISTEN_S = 10.0

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
            Version of this code. Serve keeps a router class until the kwargs differ, so that a
            new release without a new revision would go on running the old class.
        """
        self._view = FleetView()
        self._rng = random.Random()
        self._client = ControllerClient(
            controller_app, caller=f"router of {self.app_name} ({revision})"
        )
        self._listening: asyncio.Task[None] | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over Serve's replica set; the first call starts listening to the controller."""
        super().update_replicas(replicas)
        self._view.retain({replica_id.unique_id for replica_id in self.curr_replicas})
        if self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank all replicas, one per rank, most wanted first."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        now_s = time.monotonic()
        candidates = self._view.candidates(map(self._peer, candidate_replicas), now_s)
        order = self._view.policy.decide(candidates, self._rng).order
        if pending_request is not None:
            if order:
                self._view.in_flight.pick(request_id(pending_request), order[0], now_s)
            # All replicas have been offered: trying again at once would change nothing.
            pending_request.routing_context.should_backoff = True
        return [[by_id[replica_id]] for replica_id in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica has accepted the request."""
        self._view.in_flight.accept(
            request_id(pending_request), replica_id.unique_id, time.monotonic()
        )

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The request has left the replica: answered, failed, cancelled or refused."""
        self._view.in_flight.finish(internal_request_id, replica_id.unique_id, time.monotonic())

    def _peer(self, replica: RunningReplica) -> Peer:
        return Peer(
            replica_id=replica.replica_id.unique_id,
            queue_len=self.replica_queue_len_cache.get(replica.replica_id),
            hint=from_stats(routing_stats(replica)),
        )

    async def _listen(self) -> None:
        while True:
            try:
                answer = await self._client.listen(self._view.version, LISTEN_S)
                if answer is not None:
                    self._view.merge(Publication.model_validate(answer), time.monotonic())
            except ControllerUnavailableError:
                await asyncio.sleep(RETRY_PERIOD_S)
            except ValidationError as error:
                logger.error("publication of another release is not understood: %s", error)
                await asyncio.sleep(LISTEN_S)
