"""Bounds headers and body of a request before the ingress's ASGI application sees them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dps_deployments.limits import RequestLimits
from dps_deployments.refusals import RefusalError, bad_request, refusal_response

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

JSON = "application/json"
FORM = "multipart/form-data"
FORM_ROUTE = "/v1/audio/transcriptions"


class ClientLeftError(Exception):
    """The client has closed its connection before its body was complete."""


class Edge:
    """ASGI middleware that reads the whole body, within bounds, before it calls the application.

    Parameters
    ----------
    app
        The application.
    limits
        The bounds.
    """

    def __init__(self, app: App, limits: RequestLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._limits.check_headers(scope["headers"])
            body = await self._read(scope, receive)
            if body:
                _check_body(scope, body)
        except RefusalError as error:
            await refusal_response(error)(scope, receive, send)
        except ClientLeftError:
            pass
        else:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes:
        told = dict(scope["headers"]).get(b"content-length", b"")
        if told.isdigit():
            self._limits.check_body_size(int(told), whole=True)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.max_body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    # A body whose length is not told, or told wrong, is bounded as it arrives.
                    self._limits.check_body_size(size, whole=False)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise RefusalError(
                f"the body has not arrived within {self._limits.max_body_s:g} s "
                "(limits.max_body_s)",
                408,
            ) from None


def _check_body(scope: MutableMapping[str, Any], body: bytes) -> None:
    """Refuse what Ray's handler of unreadable bodies cannot tell of: it would answer 500.

    That handler puts what it has read into its answer, which fails for bytes, and for numbers and
    characters that Python reads and no JSON may hold. All else is refused there, by the field.
    """
    kinds = [value for name, value in scope["headers"] if name.lower() == b"content-type"]
    if len(kinds) > 1:
        raise bad_request("header Content-Type is given twice: give it once")
    kind = kinds[0].decode("latin-1") if kinds else ""
    wanted = FORM if scope["path"].endswith(FORM_ROUTE) else JSON
    if kind.partition(";")[0].strip().lower() != wanted:
        raise RefusalError(
            f"header Content-Type is {kind[:40]!r}: send the body as {wanted!r}", 415
        )
    if wanted == JSON:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            raise bad_request(
                "the body holds NaN, an infinite number or half a surrogate pair: JSON has none"
            ) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hand the body out once, then whatever comes: the client's leaving."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
