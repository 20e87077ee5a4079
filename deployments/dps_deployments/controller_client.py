"""Calls to the fleet controller from processes that must go on without it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dps_deployments.attendance import Attendance
from dps_deployments.direct_client import CallFailedError, DirectClient, UnreachableError
from dps_deployments.ray_adapter import CALL_ERRORS, METHOD_ERRORS, resolve_method
from dps_ray.fleet.backoff import Backoff
from dps_ray.fleet.ways import Access, Ways

CONTROLLER_DEPLOYMENT = "FleetController"
CALL_TIMEOUT_S = 2.0
RETRY_FIRST_S = 0.5
RETRY_LONGEST_S = 2.0
CLOSED_FIRST_S, CLOSED_LONGEST_S = 2.0, 60.0
"""How long calls go by the handle before the controller's port is tried again."""
FAILURES: tuple[type[BaseException], ...] = (*CALL_ERRORS, CallFailedError)

logger = logging.getLogger("ray.serve")


class ControllerUnavailableError(Exception):
    """The controller did not answer; wait as ``retries`` says and call again."""


def retries(longest_s: float = RETRY_LONGEST_S) -> Backoff:
    """How long a caller waits after calls that were not answered."""
    return Backoff(RETRY_FIRST_S, max(RETRY_FIRST_S, longest_s))


class ControllerClient:
    """One caller's connection to the controller.

    Calls go directly to the controller's port, whose address and secret its handle tells, and by
    the handle while that port cannot be reached or the controller, of an older release, has none.
    The handle is looked up again after every failure: a controller that was redeployed or moved
    is found, and nobody keeps the handle of a dead one. An outage is logged when it begins and
    when it ends, not at every failed call.

    Parameters
    ----------
    app
        Application the controller is deployed in.
    caller
        Name of the caller in the log.
    resolve
        Finds the handle of a method, as ``resolve_method`` does.
    """

    def __init__(
        self,
        app: str,
        caller: str,
        resolve: Callable[[str, str, str], Awaitable[Any]] = resolve_method,
    ) -> None:
        self._app = app
        self._caller = caller
        self._resolve = resolve
        self._methods: dict[str, Any] = {}
        self._direct = DirectClient()
        self._attendance = Attendance(self._direct)
        self._ways = Ways(time.monotonic, Backoff(CLOSED_FIRST_S, CLOSED_LONGEST_S))
        self._down = False
        self._shut_out = False

    async def report(self, state: dict[str, Any]) -> dict[str, Any]:
        """Push one ``ReplicaState`` and return the ``Reply``, both in JSON form.

        From then on a connection stays open by whose end the controller learns that this process
        has died, where calls go directly.

        Raises
        ------
        ControllerUnavailableError
            The controller did not take it.
        """
        reply = dict(await self._call("report", state, timeout_s=CALL_TIMEOUT_S))
        self._attendance.keep(self._ways.access, str(state["replica_id"]))
        return reply

    @property
    def is_cut_off(self) -> bool:
        """That connection has ended: until the next report this process counts as dead."""
        return self._attendance.is_broken

    async def listen(self, version: int | None, wait_s: float) -> dict[str, Any] | None:
        """Wait at most ``wait_s`` for a publication other than ``version``; in JSON form.

        Raises
        ------
        ControllerUnavailableError
            The controller did not answer.
        """
        answer = await self._call("listen", version, wait_s, timeout_s=wait_s + CALL_TIMEOUT_S)
        return answer if answer is None else dict(answer)

    async def report_router(self, report: dict[str, Any]) -> list[str]:
        """Push one ``RouterReport`` in JSON form and return the requests to be looked up.

        Raises
        ------
        ControllerUnavailableError
            The controller did not take it.
        """
        answer = await self._call("report_router", report, timeout_s=CALL_TIMEOUT_S)
        # A controller of an older release answers nothing.
        return list((answer or {}).get("wanted", ()))

    async def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._by_either_way(method, args)
        except FAILURES as error:
            self._methods.clear()
            if isinstance(error, TimeoutError):
                self._ways.unanswered()
            self._note_down(error)
            raise ControllerUnavailableError(str(error)) from error
        self._note_up()
        return answer

    async def _by_either_way(self, method: str, args: tuple[Any, ...]) -> Any:
        closed: UnreachableError | None = None
        while (access := await self._access()) is not None:
            try:
                answer = await self._direct.call(access, method, args)
            except UnreachableError as error:
                if self._ways.lost(access):
                    closed = error
            else:
                self._ways.reached()
                self._note_direct()
                return answer
        answer = await self._by_handle(method, args)
        if closed is not None:
            self._note_shut_out(closed)
        return answer

    async def _access(self) -> Access | None:
        if self._ways.should_ask:
            try:
                # A router that listens waits longer for its answer than to learn of an outage.
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    told = await self._by_handle("direct_access", ())
            except METHOD_ERRORS:
                # A controller of an older release.
                told = None
            self._ways.told(_access_of(told))
        return self._ways.access

    async def _by_handle(self, method: str, args: tuple[Any, ...]) -> Any:
        if method not in self._methods:
            self._methods[method] = await self._resolve(self._app, CONTROLLER_DEPLOYMENT, method)
        return await self._methods[method].remote(*args)

    def _note_down(self, error: BaseException) -> None:
        if not self._down:
            self._down = True
            logger.warning(
                "%s: fleet controller in application %r does not answer (%s); going on without it",
                self._caller,
                self._app,
                error if isinstance(error, CallFailedError) else type(error).__name__,
            )

    def _note_up(self) -> None:
        if self._down:
            self._down = False
            logger.info("%s: fleet controller in application %r is back", self._caller, self._app)

    def _note_shut_out(self, error: UnreachableError) -> None:
        if not self._shut_out:
            self._shut_out = True
            logger.warning(
                "%s: fleet controller in application %r answers by Serve's handle and not at its "
                "own port (%s); going by the handle, which costs it several times as much: let "
                "connections to `direct.address` of its status through, or set `direct.enabled` "
                "of its user_config to false",
                self._caller,
                self._app,
                error,
            )

    def _note_direct(self) -> None:
        if self._shut_out:
            self._shut_out = False
            logger.info(
                "%s: fleet controller in application %r is reached at its own port again",
                self._caller,
                self._app,
            )


def _access_of(told: Any) -> Access | None:
    """``None``: the controller has no port for calls, or one that this release cannot use."""
    if not isinstance(told, Mapping) or not {"url", "secret"} <= told.keys():
        return None
    return Access(str(told["url"]), str(told["secret"]))
