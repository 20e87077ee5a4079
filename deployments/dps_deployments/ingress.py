"""The OpenAI-compatible ingress, with refusals that say when to come back."""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.llm.ingress import OpenAiIngress

from dps_deployments.origins import FIELD
from dps_deployments.refusals import RefusalError, ReplicaLostError, overloaded, replica_lost
from dps_ray.fleet.admission import AdmissionOptions, DrainRate, retry_after_s

ATTEMPTS = 3
RETRY_PAUSE_S = 0.2
LOST_EVENTS = [
    'data: {"error":{"message":"the replica died; this answer is incomplete",'
    '"type":"ReplicaLostError","code":503}}\n\n',
    "data: [DONE]\n\n",
]

logger = logging.getLogger("ray.serve")


class DpsIngress(OpenAiIngress):
    """Ray's ingress; refusals keep their status and carry ``Retry-After``.

    A request whose replica died before it answered anything goes to another one. A stream that has
    begun ends with an error event: its tokens cannot be taken back.

    The response to a request that does not stream says in ``X-DPS-Tokens-Full`` and
    ``X-DPS-Tokens-Fast`` which mode made its tokens; a stream says so in its last chunk.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = 0
        self._drain = DrainRate()

    async def _process_llm_request(
        self, body: Any, call_method: str, raw_request: Request | None = None
    ) -> Response:
        try:
            response = await super()._process_llm_request(body, call_method, raw_request)
        except RefusalError as error:
            # One that was raised in another process is wrapped by Ray.
            return _refusal(getattr(error, "cause", error))
        if isinstance(response, JSONResponse):
            _add_origin_headers(response)
        return response

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Request | None = None
    ) -> AsyncGenerator[Any, None]:
        self._open += 1
        try:
            async for response in self._with_retries(body, call_method, raw_request):
                yield response
            self._drain.note(time.monotonic())
        finally:
            self._open -= 1

    async def _with_retries(
        self, body: Any, call_method: str, raw_request: Request | None
    ) -> AsyncGenerator[Any, None]:
        for attempts_left in reversed(range(ATTEMPTS)):
            answered = False
            try:
                async for response in super()._get_response(
                    body=body, call_method=call_method, raw_request=raw_request
                ):
                    answered = True
                    yield response
                return
            except BackPressureError as error:
                rate = self._drain.per_s(time.monotonic())
                later_s = retry_after_s(AdmissionOptions(), self._open, rate)
                raise overloaded(self._open, later_s) from error
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


def _refusal(error: RefusalError) -> JSONResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    content = {
        "error": {"message": error.message, "type": type(error).__name__, "code": error.status_code}
    }
    return JSONResponse(content=content, status_code=error.status_code, headers=headers)


def _add_origin_headers(response: JSONResponse) -> None:
    usage = json.loads(bytes(response.body)).get("usage") or {}
    origins = usage.get(FIELD)
    if origins is not None:
        response.headers["X-DPS-Tokens-Full"] = str(origins["tokens_full"])
        response.headers["X-DPS-Tokens-Fast"] = str(origins["tokens_fast"])
