"""What one router knows: the controller's publications, and its own requests on top of them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dps_ray.fleet.in_flight import InFlight
from dps_ray.fleet.publication import ControllerOptions, Publication
from dps_ray.fleet.routing import Candidate, Hint
from dps_ray.fleet.snapshot import FreshnessOptions
from dps_ray.fleet.table import StateTable


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica that Serve offers, with what Serve knows about it."""

    replica_id: str
    queue_len: int | None
    hint: Hint | None


class FleetView:
    """Candidates for a request, from the latest publication aged on the router's own clock.

    Without a controller the view still works: entries grow stale, and candidates then carry only
    what Serve and the router itself know.
    """

    def __init__(self) -> None:
        defaults = ControllerOptions()
        self.policy = defaults.routing
        self.version: int | None = None
        self.in_flight = InFlight()
        self._freshness: FreshnessOptions = defaults.ageing
        self._table = StateTable()

    def merge(self, publication: Publication, now_s: float) -> None:
        """Take in a publication.

        A replica that it does not mention is kept and grows old: a controller that has just
        restarted publishes before it has heard everybody.
        """
        self.policy = publication.routing
        self.version = publication.snapshot.version
        self._freshness = publication.freshness
        for entry in publication.snapshot.entries:
            if entry.state is not None:
                self._table.apply(entry.state, now_s, entry.age_s or 0.0)
        self._table.forget(now_s, self._freshness)

    def retain(self, replica_ids: Collection[str]) -> None:
        """Drop this router's requests on replicas that Serve no longer offers."""
        self.in_flight.retain(replica_ids)

    def candidates(self, peers: Iterable[Peer], now_s: float) -> list[Candidate]:
        """The offered replicas with everything known about them at this moment."""
        self.in_flight.expire(now_s)
        rows = []
        for peer in peers:
            entry = self._table.entry(peer.replica_id, now_s, self._freshness)
            measured_at_s = now_s - entry.age_s if entry.age_s is not None else now_s
            rows.append(
                Candidate(
                    entry=entry,
                    placed_since=self.in_flight.added_since(peer.replica_id, measured_at_s),
                    open_requests=self.in_flight.count(peer.replica_id),
                    queue_len=peer.queue_len,
                    hint=peer.hint,
                )
            )
        return rows
