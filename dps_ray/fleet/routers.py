"""The routers as the controller knows them, and what they tell about Serve's replica set."""

from collections.abc import Callable

from dps_ray.fleet.tally import RouterReport

FORGET_AFTER_S = 15.0


class RouterBook:
    """Latest report of every router.

    Parameters
    ----------
    clock
        Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, RouterReport]] = {}
        self._offered: dict[str, frozenset[str]] = {}
        self._seen: set[str] = set()
        """Replicas that some router has been offered."""

    def note(self, report: RouterReport) -> None:
        """Take in a report."""
        self._reports[report.router_id] = (self._clock(), report)
        self._offered[report.router_id] = frozenset(report.offered)
        self._seen.update(report.offered)

    def reports(self) -> list[tuple[float, RouterReport]]:
        """Age in seconds and report of every router heard lately."""
        now_s = self._clock()
        self._reports = {
            name: (at_s, report)
            for name, (at_s, report) in self._reports.items()
            if now_s - at_s <= FORGET_AFTER_S
        }
        self._offered = {name: self._offered[name] for name in self._reports}
        return [(now_s - at_s, report) for at_s, report in self._reports.values()]

    def has_withdrawn(self, replica_id: str, application: str | None) -> bool:
        """Whether Serve has offered a replica and offers it to no router of its application now.

        An application whose routers have all fallen silent has withdrawn nothing.
        """
        if replica_id not in self._seen:
            return False
        names = [r.router_id for _, r in self.reports() if r.application == application]
        return bool(names) and not any(replica_id in self._offered[name] for name in names)

    def forget(self, replica_id: str) -> None:
        """Drop a replica that is gone."""
        self._seen.discard(replica_id)
