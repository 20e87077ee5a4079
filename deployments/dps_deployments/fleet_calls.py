"""The calls that replicas and routers make, whichever way they come."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from dps_deployments.explanations import Explanations
from dps_ray.fleet.coordinator import Coordinator, Reply
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.snapshot import FreshnessOptions
from dps_ray.fleet.state import ReplicaState
from dps_ray.fleet.tally import RouterReport

MAX_WAIT_S = 30.0
GATHER_S = 0.02
"""A router gets no publication sooner than so long after it asked, seconds: among a thousand
replicas something changes every few milliseconds, and every answer has its cost on both sides."""
NOT_FOR_ROUTERS: Any = {
    "snapshot": {"entries": {"__all__": {"state": {"orders"}, "changed_ago_s": True}}}
}
"""Left out of publications, since no router reads them; every replica carries all orders."""


class FleetCalls:
    """Reports in; replies and publications out.

    Parameters
    ----------
    coordinator
        The controller's core.
    explanations
        Learns what routers tell of past requests.
    """

    def __init__(self, coordinator: Coordinator, explanations: Explanations) -> None:
        self._coordinator = coordinator
        self._explanations = explanations
        self._changed = asyncio.Event()
        self.listeners = 0
        """Routers that wait for a publication."""
        self.attending: Counter[str] = Counter()
        """Connections that each replica keeps open."""

    def report(self, state: ReplicaState) -> Reply:
        """Take in one replica's report."""
        aggregate = self._coordinator.aggregate
        before = aggregate.version
        reply = self._coordinator.report(state)
        if aggregate.version != before:
            self.wake()
        return reply

    def report_router(self, report: RouterReport) -> dict[str, Any]:
        """Take in one router's report; the answer names requests to look up."""
        taken, wanted = self._explanations.take(report)
        self._coordinator.routers.note(taken)
        return {"wanted": wanted}

    @contextlib.contextmanager
    def attendance(self, replica_id: str) -> Iterator[None]:
        """The time in which a replica keeps a connection open."""
        self.attending[replica_id] += 1
        try:
            yield
        finally:
            self.attending -= Counter([replica_id])

    def has_gone(self, replica_id: str) -> None:
        """A replica's connection has broken; it may have opened another before."""
        if not self.attending[replica_id]:
            self._coordinator.lose(replica_id)
            self.wake()

    async def listen(self, version: int | None, timeout_s: float) -> dict[str, Any] | None:
        """Answer with a ``Publication`` as soon as its version is not ``version``.

        Parameters
        ----------
        version
            What the caller has; ``None`` for nothing.
        timeout_s
            Longest wait, seconds; capped at 30.

        Returns
        -------
        dict or None
            The publication in JSON form; ``None`` when the wait passed without a new one.
        """
        asked_s = time.monotonic()
        deadline_s = asked_s + min(timeout_s, MAX_WAIT_S)
        self.listeners += 1
        try:
            while True:
                self._coordinator.tick()
                if self._coordinator.aggregate.version != version:
                    if version is not None:
                        await asyncio.sleep(asked_s + GATHER_S - time.monotonic())
                    publication = self._publication(version)
                    return publication.model_dump(mode="json", exclude=NOT_FOR_ROUTERS)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                period_s = self._coordinator.options.ageing.publish_period_s
                await self._wait_for_change(min(left_s, period_s))
        finally:
            self.listeners -= 1

    def wake(self) -> None:
        """Let routers that listen look for a new version."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _publication(self, since: int | None) -> Publication:
        options = self._coordinator.options
        return Publication(
            snapshot=self._coordinator.aggregate.changes_since(since),
            routing=options.routing,
            dry_run=options.dry_run,
            admission=options.admission,
            freshness=FreshnessOptions(
                stale_after_s=options.ageing.stale_after_s,
                forget_after_s=options.ageing.forget_after_s,
            ),
        )

    async def _wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
