"""The one place that names alpha or private interfaces of Ray; everything else uses these.

Importing it on an unsupported Ray raises the one-line error of ``require_supported_ray``.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dps_autoscaling.ray_version import require_supported_ray

require_supported_ray()

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray._private.worker import global_worker  # noqa: E402
from ray.exceptions import RayError, RayTaskError  # noqa: E402
from ray.serve.exceptions import RayServeException  # noqa: E402
from ray.serve.handle import DeploymentHandle  # noqa: E402
from ray.serve.request_router import (  # noqa: E402
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

__all__ = [
    "CALL_ERRORS",
    "METHOD_ERRORS",
    "PendingRequest",
    "ReplicaID",
    "ReplicaIdentity",
    "RequestRouter",
    "RunningReplica",
    "WrappedApp",
    "client_request_id",
    "deployed_replicas",
    "end_with",
    "engine_client",
    "kept_with",
    "node_id",
    "node_ip",
    "replica_identity",
    "request_id",
    "resolve_method",
    "routing_stats",
    "skip_fetching",
    "stop_flag",
    "unplaced",
]

CALL_ERRORS: tuple[type[BaseException], ...] = (RayError, RayServeException, TimeoutError)
"""What a call to another deployment raises when that deployment is missing, dying or slow."""

METHOD_ERRORS: tuple[type[BaseException], ...] = (RayTaskError,)
"""Those of them that the other side itself has answered with, also where it has no such method."""

_KEPT = "_dps_kept"
T = TypeVar("T")


class WrappedApp:
    """Lets an ingress class stand before the ASGI application that Serve has made of it."""

    def wrap_app(self, app: Any) -> Any:
        """The application to be called in the place of ``app``."""
        raise NotImplementedError

    def _set_asgi_app(self, app: Any) -> None:
        # Of ``ASGIAppReplicaWrapper``, which ``serve.ingress`` puts behind the class.
        super()._set_asgi_app(self.wrap_app(app))  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Who this process is in the fleet."""

    replica_id: str
    deployment: str
    node_id: str


def replica_identity() -> ReplicaIdentity:
    """Identity of the Serve replica that runs in this process."""
    replica_id = serve.get_replica_context().replica_id
    return ReplicaIdentity(
        replica_id=replica_id.unique_id,
        deployment=f"{replica_id.deployment_id.app_name}#{replica_id.deployment_id.name}",
        node_id=node_id(),
    )


def deployed_replicas() -> int | None:
    """Replicas that Serve was told to run of this process's deployment; ``None``: it scales."""
    config = serve.get_replica_context()._deployment_config
    return config.num_replicas if config.autoscaling_config is None else None


def stop_flag() -> Callable[[], bool]:
    """How a replica learns that Serve is stopping it: it then finishes what it has.

    Serve tells user code nothing before the last request has ended; the actor knows.
    """
    (replica,) = [
        actor._replica_impl
        for actor in global_worker.actors.values()
        if hasattr(actor, "_replica_impl")
    ]
    return lambda: bool(replica._shutting_down)


def node_id() -> str:
    """Node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def node_ip() -> str:
    """IP address that the nodes of the cluster reach this process's node by."""
    return str(ray.util.get_node_ip_address())


async def resolve_method(app: str, deployment: str, method: str) -> DeploymentHandle:
    """Handle of one method of a deployment of another application; call ``remote`` on it.

    Looking up a deployment and naming one of its methods both build a router and block until the
    process's router loop has taken it in. Done inside that very loop they would wait for
    themselves for ever, and all routing of the process with them; hence the thread.
    """

    def resolve() -> DeploymentHandle:
        return getattr(serve.get_deployment_handle(deployment, app), method)

    return await asyncio.to_thread(resolve)


def request_id(pending_request: PendingRequest) -> str:
    """Name of a request, the same in every hook of a router."""
    return str(pending_request.metadata.internal_request_id)


def client_request_id(pending_request: PendingRequest) -> str:
    """Name of a request for its client: the header ``X-Request-ID``; the same at each new try."""
    return str(pending_request.metadata.request_id)


def kept_with(pending_request: PendingRequest, make: Callable[[], T]) -> T:
    """What a router keeps with a request, also when replicas refuse it; made at the first call.

    Serve gives a refused request a new future, and requests cannot be hashed.
    """
    kept: dict[str, Any] = vars(pending_request)
    if _KEPT not in kept:
        kept[_KEPT] = make()
    value: T = kept[_KEPT]
    return value


def routing_stats(replica: RunningReplica) -> dict[str, Any]:
    """Latest ``record_routing_stats`` of a replica that reached this router; may be empty."""
    return dict(replica.routing_stats)


def unplaced(router: RequestRouter) -> list[PendingRequest]:
    """Requests that a router has not placed on a replica yet."""
    pending = router._pending_requests_by_id.values()
    return [request for request in pending if not request.future.done()]


def end_with(router: RequestRouter, pending_request: PendingRequest, error: Exception) -> None:
    """End a request that has not been placed, and let the router forget it.

    Ray drops ended requests from its queues while it places others; without replicas it places
    none, and the queues would grow as long as the outage lasts.
    """
    if not pending_request.future.done():
        pending_request.future.set_exception(error)
    router._cancel_routing_task_for_pending_request(pending_request)
    router._remove_pending_request_from_indices(pending_request)
    for queue in (router._pending_requests_to_fulfill, router._pending_requests_to_route):
        while queue and queue[0].future.done():
            queue.popleft()


def skip_fetching(llm_config: Any) -> None:
    """Leave out the task by which Ray fetches a model, where there is nothing to fetch.

    For a folder it does nothing, but its process loads all of Ray's LLM library first. On GPUs it
    stays: there it also prepares a cache of torch's. It stays for a callback of the user's own.
    """
    source = llm_config.model_loading_config.model_source
    if (
        isinstance(source, str)
        and Path(source).is_dir()
        and "callback_config" not in llm_config.model_fields_set
        and not llm_config.get_engine_config().accelerator.requires_remote_initialization
    ):
        llm_config.get_or_create_callback().ctx.run_init_node = False


def engine_client(server: Any) -> Any:
    """vLLM's ``AsyncLLM`` inside a started ``ray.serve.llm`` server."""
    return server.engine._engine_client
