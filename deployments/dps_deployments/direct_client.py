"""One caller's connection to the port on which the controller takes calls directly."""

import socket
from typing import Any

import httpx
import pydantic_core

from dps_ray.fleet.ways import Access

CONNECT_TIMEOUT_S = 1.0
"""Within the time of one call its caller must still be able to go by the handle."""
KEEP_ALIVE_S = 150
"""The controller keeps a connection open for so long, longer than its callers use an idle one: a
call on a connection that is being closed would fail."""
CALLER_KEEP_ALIVE_S = 120.0
TIMEOUTS = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S).as_dict()
"""How long the answer may take is the caller's to say."""
FAILED_CALL = {413, 422, 500}
"""Statuses with which the controller says that it is the right one and does not take the call."""
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""Of both ends: some connections are silent for hours, and one whose other end has vanished without
a word is over after half a minute."""


def encode(value: Any) -> bytes:
    """JSON of plain objects, in which numbers may be ``Infinity`` and ``NaN``."""
    return pydantic_core.to_json(value, inf_nan_mode="constants")


class UnreachableError(Exception):
    """The controller is not there, or not any more.

    Parameters
    ----------
    message
        What was found instead.
    status
        HTTP status of who answered; ``None`` when nobody did.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class CallFailedError(Exception):
    """The controller refuses this call."""


class DirectClient:
    """Sends calls and keeps the connection open between them.

    It uses httpx's transport without its client, which doubles the cost of a call and logs a line
    for each.
    """

    def __init__(self) -> None:
        self._transport = httpx.AsyncHTTPTransport(
            # The address is of plain HTTP; loading certificates would take 20 ms.
            verify=False,
            limits=httpx.Limits(keepalive_expiry=CALLER_KEEP_ALIVE_S),
            socket_options=SOCKET_OPTIONS,
        )

    async def call(self, access: Access, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method with arguments in JSON form and return its answer.

        Raises
        ------
        UnreachableError
            No controller answers there, or another one than the access is for.
        CallFailedError
            The controller has taken the call and failed at it.
        """
        request = httpx.Request(
            "POST",
            f"{access.url}/{method}",
            headers={"Authorization": f"Bearer {access.secret}"},
            content=encode(args),
            extensions={"timeout": TIMEOUTS},
        )
        try:
            response = await self._transport.handle_async_request(request)
            answer = await response.aread()
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise UnreachableError(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        if status in FAILED_CALL:
            raise CallFailedError(f"{method}: {status} {answer[:1000].decode(errors='replace')}")
        if status != 200:
            raise UnreachableError(f"{method}: {status}", status)
        try:
            return pydantic_core.from_json(answer)
        except ValueError as error:
            raise UnreachableError(f"{method}: {error}") from error
