"""A replica's open connection to the controller, by whose end its death is seen at once."""

import asyncio
import random

from dps_deployments.direct_client import CallFailedError, DirectClient, UnreachableError
from dps_ray.fleet.ways import Access

SPREAD_S = 0.2
"""The replicas of a fleet that are cut off together report within so long, not at one moment."""
NO_SUCH_CALL = 404
"""The answer of a controller of an older release."""


class Attendance:
    """Keeps one connection open, to the controller that answered the latest report.

    Parameters
    ----------
    direct
        Opens it.
    """

    def __init__(self, direct: DirectClient) -> None:
        self._direct = direct
        self._access: Access | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_broken = False
        """It has ended, and this process lives: the controller must hear so."""

    def keep(self, access: Access | None, replica_id: str) -> None:
        """A report was answered; ``access`` is ``None`` where calls go by the handle."""
        if access == self._access and not self.is_broken:
            return
        self.is_broken = False
        if self._task is not None:
            # One to a controller that vanished without a word would never end.
            self._task.cancel()
        self._access, self._task = access, None
        if access is not None:
            self._task = asyncio.create_task(self._attend(access, replica_id))

    async def _attend(self, access: Access, replica_id: str) -> None:
        try:
            await self._direct.call(access, "attend", (replica_id,))
        except CallFailedError:
            return
        except UnreachableError as error:
            if error.status == NO_SUCH_CALL:
                return
        await asyncio.sleep(random.uniform(0.0, SPREAD_S))
        self.is_broken = True
