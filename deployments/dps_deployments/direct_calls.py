"""The fleet's calls over HTTP on a port of the controller's own, without Serve in between.

A call over Serve's handle costs the controller several times what is done about it. Here a call is
``POST /METHOD`` with its arguments as a JSON array; the answer is JSON too.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dps_deployments.direct_client import encode
from dps_deployments.fleet_calls import FleetCalls
from dps_ray.fleet.state import ReplicaState
from dps_ray.fleet.tally import RouterReport

MAX_BODY_BYTES = 8 << 20
"""Router reports with many explanations are the largest, some hundred kilobytes."""

REPORT = TypeAdapter(tuple[ReplicaState])
ROUTER_REPORT = TypeAdapter(tuple[RouterReport])
LISTEN = TypeAdapter(tuple[int | None, float])
ATTEND = TypeAdapter(tuple[str])
PATHS = ("/report", "/listen", "/report_router", "/attend")

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class DirectCalls:
    """ASGI application of the calls. Each must bring ``secret``.

    Parameters
    ----------
    calls
        Does what is asked.
    """

    def __init__(self, calls: FleetCalls) -> None:
        self._calls = calls
        self.secret = secrets.token_urlsafe(32)
        """Made anew by every controller; who may call its handles is told."""
        self._expected = f"Bearer {self.secret}".encode()
        self.answered = 0
        """Calls since start, those of callers included that had gone when it was their turn."""

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        status, answer = await self._answer(scope, receive)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(answer)),
        ]
        if status != 200:
            # What is still to come of the body is not read.
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _answer(self, scope: Mapping[str, Any], receive: Receive) -> tuple[int, bytes]:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        if not hmac.compare_digest(given, self._expected):
            return 401, encode("ask the controller's handle for its secret")
        if scope["path"] not in PATHS:
            return 404, encode(f"there is no call {scope['path']}")
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MAX_BODY_BYTES:
                return 413, encode(f"the body is larger than {MAX_BODY_BYTES} bytes")
        try:
            answer = await self._call(scope["path"], bytes(body), receive)
        except ValidationError as error:
            return 422, encode(str(error))
        except asyncio.CancelledError:
            # Of a router that listens, after a second's grace; it is told rather than cut off.
            return 503, encode("this port is being closed")
        self.answered += 1
        return 200, encode(answer)

    async def _call(self, path: str, body: bytes, receive: Receive) -> Any:
        if path == "/report":
            (state,) = REPORT.validate_json(body)
            return self._calls.report(state).model_dump(mode="json")
        if path == "/listen":
            return await self._listen(*LISTEN.validate_json(body), receive)
        if path == "/attend":
            return await self._attend(*ATTEND.validate_json(body), receive)
        (report,) = ROUTER_REPORT.validate_json(body)
        return self._calls.report_router(report)

    async def _attend(self, replica_id: str, receive: Receive) -> None:
        """Wait for the end of the connection, which comes at once when its process is killed.

        Where this port is closed instead, nobody has gone.
        """
        with self._calls.attendance(replica_id):
            # The body has been read: nothing else can come.
            await receive()
        self._calls.has_gone(replica_id)

    async def _listen(self, version: int | None, timeout_s: float, receive: Receive) -> Any:
        """A router that has gone listens no longer."""
        answer = asyncio.create_task(self._calls.listen(version, timeout_s))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            answer.cancel()
            gone.cancel()
