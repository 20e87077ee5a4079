"""Ports of the controller's own, to which no route of Serve leads."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from dps_deployments.direct_client import SOCKET_OPTIONS

RETRY_PERIOD_S = 1.0

logger = logging.getLogger("ray.serve")


class Listener:
    """Serves an ASGI application at one place, in the event loop that calls it.

    A port that is taken is no reason to stop the controller: the fault is kept in ``fault``, and
    the listener tries again until the port is free, as it is when a predecessor has ended.

    Parameters
    ----------
    app
        The application.
    section
        Part of the controller's ``user_config`` that says where to listen; for messages.
    purpose
        What is taken there; for messages.
    keep_alive_s
        How long a connection stays open without a call, seconds.
    """

    def __init__(self, app: Any, *, section: str, purpose: str, keep_alive_s: int) -> None:
        self._app = app
        self._section = section
        self._purpose = purpose
        self._keep_alive_s = keep_alive_s
        self._place: tuple[str, int] | None = None
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.bound: tuple[str, int] | None = None
        """Host and port while calls are taken there."""
        self.fault: str | None = None
        """Why nobody can call although there is a place."""

    @property
    def address(self) -> str | None:
        """``host:port`` while calls are taken there."""
        return None if self.bound is None else host_and_port(*self.bound)

    async def apply(self, place: tuple[str, int] | None) -> None:
        """Listen at a host and port, 0 for any free one; ``None``: nowhere.

        Returns when it has been tried once.
        """
        if place == self._place:
            return
        await self.close()
        self._place = place
        if place is not None:
            tried = asyncio.Event()
            self._task = asyncio.create_task(self._listen(*place, tried.set))
            await tried.wait()

    async def close(self) -> None:
        """Stop listening; calls under way are answered."""
        task, self._task, self._place, self.fault = self._task, None, None, None
        self.bound = None
        if task is None:
            return
        if self._server is not None:
            self._server.should_exit = True
        else:
            task.cancel()
        await asyncio.wait([task])

    async def _listen(self, host: str, port: int, tried: Callable[[], None]) -> None:
        try:
            while True:
                try:
                    listening = _bind(host, port)
                except OSError as error:
                    self._note(host, port, error)
                    tried()
                    await asyncio.sleep(RETRY_PERIOD_S)
                    continue
                self.fault = None
                await self._serve(host, listening, tried)
                return
        finally:
            tried()

    async def _serve(self, host: str, listening: socket.socket, tried: Callable[[], None]) -> None:
        def started() -> None:
            self.bound = host, listening.getsockname()[1]
            logger.info("%s are taken at %s", self._purpose, self.address)
            tried()

        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=self._keep_alive_s,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config, started)
        try:
            await self._server.serve(sockets=[listening])
        finally:
            self._server = self.bound = None
            listening.close()

    def _note(self, host: str, port: int, error: OSError) -> None:
        section = self._section
        if error.errno == errno.EADDRINUSE:
            fault = (
                f"{section}.port is {port}: another process of {socket.gethostname()} listens "
                "there; end it, or give another port"
            )
        else:
            fault = (
                f"{section}.host is {host!r} and {section}.port {port}: nobody can listen there "
                f"({error})"
            )
        if fault != self.fault:
            logger.error("no %s: %s", self._purpose, fault)
        self.fault = fault


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the replica's."""
        yield


def host_and_port(host: str, port: int) -> str:
    """As a URL writes them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    # Connections inherit them. Event loops set it only on sockets that name their protocol, and the
    # two parts of an answer would be the 40 ms of a delayed acknowledgement apart.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in SOCKET_OPTIONS:
        listening.setsockopt(*option)
    return listening
