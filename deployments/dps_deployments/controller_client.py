"""Calls to the fleet controller from processes that must go on without it."""

import asyncio
import logging
from typing import Any

from dps_deployments.ray_adapter import CALL_ERRORS, resolve_method

CONTROLLER_DEPLOYMENT = "FleetController"
CALL_TIMEOUT_S = 2.0
RETRY_PERIOD_S = 0.5

logger = logging.getLogger("ray.serve")


class ControllerUnavailableError(Exception):
    """The controller did not answer; wait ``RETRY_PERIOD_S`` and call again."""


class ControllerClient:
    """One caller's connection to the controller.

    The handle is looked up again after every failure: a controller that was redeployed or moved
    is found, and nobody keeps the handle of a dead one. An outage is logged when it begins and
    when it ends, not at every failed call.

    Parameters
    ----------
    app
        Application the controller is deployed in.
    caller
        Name of the caller in the log.
    """

    def __init__(self, app: str, caller: str) -> None:
        self._app = app
        self._caller = caller
        self._methods: dict[str, Any] = {}
        self._down = False

    async def report(self, state: dict[str, Any]) -> dict[str, Any]:
        """Push one ``ReplicaState`` and return the ``Reply``, both in JSON form.

        Raises
        ------
        ControllerUnavailableError
            The controller did not take it.
        """
        return dict(await self._call("report", state, timeout_s=CALL_TIMEOUT_S))

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
                if method not in self._methods:
                    self._methods[method] = await resolve_method(
                        self._app, CONTROLLER_DEPLOYMENT, method
                    )
                answer = await self._methods[method].remote(*args)
        except CALL_ERRORS as error:
            self._methods.clear()
            self._note_down(error)
            raise ControllerUnavailableError(str(error)) from error
        self._note_up()
        return answer

    def _note_down(self, error: BaseException) -> None:
        if not self._down:
            self._down = True
            logger.warning(
                "%s: fleet controller in application %r does not answer (%s); going on without it",
                self._caller,
                self._app,
                type(error).__name__,
            )

    def _note_up(self) -> None:
        if self._down:
            self._down = False
            logger.info("%s: fleet controller in application %r is back", self._caller, self._app)
