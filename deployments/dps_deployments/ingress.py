"""The OpenAI-compatible ingress, with refusals that say when to come back."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.llm.ingress import OpenAiIngress

from dps_deployments.beside import beside
from dps_deployments.edge import App, Edge
from dps_deployments.ingress_queue import IngressQueue
from dps_deployments.limits import RequestLimits
from dps_deployments.origins import FIELD
from dps_deployments.ray_adapter import WrappedApp, deployed_replicas
from dps_deployments.refusals import (
    RefusalError,
    ReplicaLostError,
    bad_request,
    refusal_response,
    replica_lost,
)
from dps_deployments.requests import floor_of, leave_wait, priority_of, wait_of
from dps_ray.config import DpsConfigError
from dps_ray.modes import Floor

ATTEMPTS = 3
RETRY_PAUSE_S = 0.2
LOST_EVENTS = [
    'data: {"error":{"message":"the replica died; this answer is incomplete",'
    '"type":"ReplicaLostError","code":503}}\n\n',
    "data: [DONE]\n\n",
]

logger = logging.getLogger("ray.serve")


class DpsIngress(WrappedApp, OpenAiIngress):
    """Ray's ingress; refusals keep their status and carry ``Retry-After``.

    A request whose replica died before it answered anything goes to another one. A stream that has
    begun ends with an error event: its tokens cannot be taken back.

    The response to a request that does not stream says in ``X-DPS-Tokens-Full`` and
    ``X-DPS-Tokens-Fast`` which mode made its tokens; a stream says so in its last chunk.

    Parameters
    ----------
    limits
        Bounds on what a request may bring.
    priorities
        The engines schedule by priority.
    ingress_replicas
        How many ingress replicas share the places of the fleet.
    application
        Name of the Serve application; ``None`` for the one this replica belongs to.
    """

    def __init__(
        self,
        *args: Any,
        limits: RequestLimits | None = None,
        priorities: bool = False,
        ingress_replicas: int = 1,
        application: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if application is None:
            application = serve.get_replica_context().app_name
            _check_deployed(deployed_replicas(), ingress_replicas)
        self._limits = limits or RequestLimits()
        self._priorities = priorities
        self._beside = beside(application)
        self._queue = IngressQueue(lambda: self._beside, ingress_replicas)

    def wrap_app(self, app: FastAPI) -> App:
        app.add_exception_handler(RefusalError, _refused)
        return Edge(app, self._limits)

    async def _process_llm_request(
        self, body: Any, call_method: str, raw_request: Request | None = None
    ) -> Response:
        response = await super()._process_llm_request(body, call_method, raw_request)
        if isinstance(response, JSONResponse):
            _add_origin_headers(response)
        return response

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Request | None = None
    ) -> AsyncGenerator[Any, None]:
        headers = raw_request.headers if raw_request is not None else None
        self._limits.check_prompts(body)
        priority = self._priority_of(body, headers)
        floor = floor_of(body, headers)
        wait_s = wait_of(body, headers)
        if floor is Floor.FULL:
            wait_s = self._beside.admission.longest_full_wait_s(wait_s)
        # One wait for all stages and tries: each leaves the next what it has not used.
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        async with self._place(priority, floor, wait_s) as served:
            streams = bool(getattr(body, "stream", None))
            async for response in self._with_retries(body, call_method, raw_request, deadline_s):
                # Ray takes one response where no stream is asked for, and never comes back.
                if not streams and getattr(response, "error", None) is None:
                    served()
                yield response
            if streams:
                served()

    @contextlib.asynccontextmanager
    async def _place(
        self, priority: int, floor: Floor, wait_s: float | None
    ) -> AsyncIterator[Callable[[], None]]:
        """A place in the queue's order, or one aside while no replica is in the mode asked for."""
        if floor is Floor.FULL and not self._beside.serves_full:
            with self._queue.aside() as served:
                yield served
        else:
            async with self._queue.place(priority, wait_s) as served:
                yield served

    def _priority_of(self, body: Any, headers: Mapping[str, str] | None) -> int:
        priority = priority_of(body, headers)
        if priority and not self._priorities:
            raise bad_request(
                f"priority is {priority}: this fleet serves in the order of arrival, until its "
                "operator sets engine_kwargs.scheduling_policy to 'priority'"
            )
        if priority < self._limits.min_priority:
            raise bad_request(
                f"priority is {priority}: at least {self._limits.min_priority} "
                "(limits.min_priority), lower is sooner"
            )
        return priority

    async def _with_retries(
        self, body: Any, call_method: str, raw_request: Request | None, deadline_s: float | None
    ) -> AsyncGenerator[Any, None]:
        for attempts_left in reversed(range(ATTEMPTS)):
            answered = False
            if deadline_s is not None:
                leave_wait(body, deadline_s - time.monotonic())
            try:
                async for response in super()._get_response(
                    body=body, call_method=call_method, raw_request=raw_request
                ):
                    answered = True
                    yield response
                return
            except BackPressureError as error:
                raise self._queue.refusal() from error
            except (ReplicaLostError, RayActorError) as error:
                logger.warning(
                    "a replica died under a request (%s); answered: %s, attempts left: %d",
                    type(error).__name__,
                    answered,
                    attempts_left,
                )
                if answered:
                    yield LOST_EVENTS
                    return
                if not attempts_left:
                    raise replica_lost("and so did the others that were tried") from error
            # Time for the death to reach the router.
            await asyncio.sleep(RETRY_PAUSE_S)


def _check_deployed(deployed: int | None, told: int) -> None:
    """Refuse to serve beside more ingress replicas than share the places.

    Raises
    ------
    DpsConfigError
        Options under the application's ``deployments`` have changed their number.
    """
    if deployed != told:
        number = "autoscaled" if deployed is None else deployed
        raise DpsConfigError(
            f"deployments[].num_replicas of the ingress is {number} and args.ingress.num_replicas "
            f"is {told}: each ingress replica takes its share of the places by the latter; set it "
            "there and remove the ingress from deployments"
        )


async def _refused(_: Request, error: Any) -> Response:
    """The handler of refusals on all routes."""
    # One that was raised in another process is wrapped by Ray.
    return refusal_response(getattr(error, "cause", error))


def _add_origin_headers(response: JSONResponse) -> None:
    usage = json.loads(bytes(response.body)).get("usage") or {}
    origins = usage.get(FIELD)
    if origins is not None:
        response.headers["X-DPS-Tokens-Full"] = str(origins["tokens_full"])
        response.headers["X-DPS-Tokens-Fast"] = str(origins["tokens_fast"])
