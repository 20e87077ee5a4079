"""The one place that names alpha or private interfaces of Ray; everything else uses these.

Importing it on an unsupported Ray raises the one-line error of ``require_supported_ray``.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from dps_deployments.ray_version import require_supported_ray

require_supported_ray()

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import RayError  # noqa: E402
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
    "PendingRequest",
    "ReplicaID",
    "ReplicaIdentity",
    "RequestRouter",
    "RunningReplica",
    "engine_client",
    "replica_identity",
    "request_id",
    "resolve_handle",
    "routing_stats",
]

CALL_ERRORS: tuple[type[BaseException], ...] = (RayError, RayServeException, TimeoutError)
"""What a call to another deployment raises when that deployment is missing, dying or slow."""


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
        node_id=ray.get_runtime_context().get_node_id(),
    )


async def resolve_handle(app: str, deployment: str) -> DeploymentHandle:
    """Handle of a deployment of another application.

    Creating a handle blocks on Serve's controller. Inside the event loop that runs a router it
    would wait for a reply which only that loop can deliver, hence the thread.
    """
    return await asyncio.to_thread(serve.get_deployment_handle, deployment, app)


def request_id(pending_request: PendingRequest) -> str:
    """Name of a request, the same in every hook of a router."""
    return str(pending_request.metadata.internal_request_id)


def routing_stats(replica: RunningReplica) -> dict[str, Any]:
    """Latest ``record_routing_stats`` of a replica that reached this router; may be empty."""
    return dict(replica.routing_stats)


def engine_client(server: Any) -> Any:
    """vLLM's ``AsyncLLM`` inside a started ``ray.serve.llm`` server."""
    return server.engine._engine_client
