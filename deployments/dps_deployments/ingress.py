"""The OpenAI-compatible ingress, with refusals that say when to come back."""

import json
import math
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from ray.serve.llm.ingress import OpenAiIngress

from dps_deployments.origins import FIELD
from dps_deployments.refusals import RefusalError


class DpsIngress(OpenAiIngress):
    """Ray's ingress; refusals keep their status and carry ``Retry-After``.

    The response to a request that does not stream says in ``X-DPS-Tokens-Full`` and
    ``X-DPS-Tokens-Fast`` which mode made its tokens; a stream says so in its last chunk.
    """

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
