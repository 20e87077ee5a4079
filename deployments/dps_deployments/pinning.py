"""Brings the operator's mode pin to the engine, until the engine has taken it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from dps_ray.modes import Pin

RETRY_PAUSE_S = 1.0

logger = logging.getLogger("ray.serve")


class PinKeeper:
    """Pushes a pin whenever it differs from what the engine has taken; a failed push is repeated.

    Parameters
    ----------
    started_with
        The pin that the engine was started with.
    push
        Hands a pin to every rank of the engine.
    retry_pause_s
        Time between a failed push and the next, seconds.
    """

    def __init__(
        self,
        started_with: Pin,
        push: Callable[[Pin], Awaitable[object]],
        retry_pause_s: float = RETRY_PAUSE_S,
    ) -> None:
        self._started_with = self._taken = started_with
        self._push = push
        self._retry_pause_s = retry_pause_s
        self._retry_at_s = 0.0
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    def keep(self, wanted: Pin | None) -> None:
        """Begin to push where that is needed; call it often.

        Parameters
        ----------
        wanted
            The operator's pin; ``None`` for the one that the engine was started with.
        """
        pin = wanted or self._started_with
        busy = self._task is not None and not self._task.done()
        if pin is self._taken or busy or time.monotonic() < self._retry_at_s:
            return
        self._task = asyncio.create_task(self._apply(pin))

    async def _apply(self, pin: Pin) -> None:
        try:
            await self._push(pin)
        except Exception as error:
            self._retry_at_s = time.monotonic() + self._retry_pause_s
            if not self._failing:
                logger.warning(
                    "the engine did not take the pin %r (%s: %s); trying again every %.1f s",
                    pin.value,
                    type(error).__name__,
                    error,
                    self._retry_pause_s,
                )
            self._failing = True
        else:
            self._taken = pin
            self._failing = False
