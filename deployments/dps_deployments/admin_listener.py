"""Orders by call have a listener of their own, which the public route does not lead to."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from dps_ray.fleet.publication import AdminOptions

RETRY_PERIOD_S = 1.0
BACKLOG = 16
KEEP_ALIVE_S = 2

logger = logging.getLogger("ray.serve")


class AdminListener:
    """Serves an ASGI application where ``AdminOptions`` say, in the event loop that calls it.

    A port that is taken is no reason to stop the controller: the fault is kept in ``fault``, and
    the listener tries again until the port is free, as it is when a predecessor has ended.

    Parameters
    ----------
    app
        The application.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._place: tuple[str, int] | None = None
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.fault: str | None = None
        """Why nobody can call although calls are on."""

    @property
    def address(self) -> str | None:
        """``host:port`` while calls are taken there."""
        if self._place is None or self._server is None or not self._server.started:
            return None
        return f"{self._place[0]}:{self._place[1]}"

    async def apply(self, options: AdminOptions) -> None:
        """Listen where the options say; nowhere where they name no token."""
        place = (options.host, options.port) if options.has_token else None
        if place == self._place:
            return
        await self.close()
        self._place = place
        if place is not None:
            self._task = asyncio.create_task(self._listen(*place))

    async def close(self) -> None:
        """Stop listening; calls under way are answered."""
        task, self._task, self._place, self.fault = self._task, None, None, None
        if task is None:
            return
        if self._server is not None:
            self._server.should_exit = True
        else:
            task.cancel()
        await asyncio.wait([task])

    async def _listen(self, host: str, port: int) -> None:
        while True:
            try:
                listening = _bind(host, port)
            except OSError as error:
                self._note(host, port, error)
                await asyncio.sleep(RETRY_PERIOD_S)
                continue
            self.fault = None
            logger.info("admin calls are taken at %s:%d", host, port)
            self._server = _Server(
                uvicorn.Config(
                    self._app,
                    lifespan="off",
                    log_config=None,
                    log_level="warning",
                    access_log=False,
                    timeout_keep_alive=KEEP_ALIVE_S,
                    timeout_graceful_shutdown=1,
                )
            )
            try:
                await self._server.serve(sockets=[listening])
            finally:
                self._server = None
                listening.close()
            return

    def _note(self, host: str, port: int, error: OSError) -> None:
        if error.errno == errno.EADDRINUSE:
            fault = (
                f"admin.port is {port}: another process of {socket.gethostname()} listens there; "
                "end it, or give another port"
            )
        else:
            fault = (
                f"admin.host is {host!r} and admin.port {port}: nobody can listen there ({error})"
            )
        if fault != self.fault:
            logger.error("no admin calls: %s", fault)
        self.fault = fault


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the replica's."""
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
