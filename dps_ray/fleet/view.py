"""What one router knows: the controller's publications, and its own requests on top of them."""

from collections.abc import Sequence

import numpy as np

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.columns import FAST, Columns
from dps_ray.fleet.decision import Decision
from dps_ray.fleet.in_flight import InFlight
from dps_ray.fleet.pipeline import Pipeline
from dps_ray.fleet.policies import Policy
from dps_ray.fleet.prefixes import PrefixIndex
from dps_ray.fleet.publication import ControllerOptions, Publication
from dps_ray.fleet.routing import Hint, Peer
from dps_ray.fleet.snapshot import FreshnessOptions, Standing
from dps_ray.fleet.table import StateTable
from dps_ray.fleet.tally import DryRun, RouterReport, RouterTally

NO_ASK = Ask()
QUEUE_LEN_VALID_S = 10.0
"""How long a queue length that Serve has heard says something, seconds; as in Serve itself."""
EXPIRY_PERIOD_S = 0.5


class FleetView:
    """Decides for one router, on the latest publication aged on the router's own clock.

    Without a controller the view still works: entries grow stale, and decisions then rest on what
    Serve and the router itself know. Every ``now_s`` is monotonic seconds of one clock.

    Parameters
    ----------
    rng
        Breaks ties and draws probes.
    node_id
        Node of this router.
    """

    def __init__(self, rng: np.random.Generator, node_id: str | None = None) -> None:
        defaults = ControllerOptions()
        self.version: int | None = None
        self.admission = defaults.admission
        self._rng = rng
        self._node_id = node_id
        self._freshness: FreshnessOptions = defaults.ageing
        self._table = StateTable()
        self._in_flight = InFlight()
        self._prefixes = PrefixIndex()
        self._hints: dict[str, Hint | None] = {}
        self._columns = Columns((), node_id)
        self._stale_at_s = np.zeros(0)
        """When each row's entry will be stale."""
        self._next_change_s = float("inf")
        self._next_expiry_s = 0.0
        self._policy: Policy = defaults.routing
        self._pipeline: Pipeline = self._policy.build(rng)
        self._dry_run: DryRun | None = None
        self._dry_pipeline: Pipeline | None = None
        self.tally = RouterTally()

    def merge(self, publication: Publication, now_s: float) -> None:
        """Take in a publication.

        A replica that it does not mention is kept and grows old: publications name only what has
        changed, and a controller that has just restarted has not heard everybody.
        """
        if publication.routing != self._policy:
            self._policy = publication.routing
            self._pipeline = self._policy.build(self._rng)
        if publication.dry_run != self._dry_run:
            self._dry_run = dry_run = publication.dry_run
            self._dry_pipeline = dry_run.policy.build(self._rng) if dry_run is not None else None
            self.tally.start_dry_run(dry_run.policy.name if dry_run is not None else None)
        self.admission = publication.admission
        self.version = publication.snapshot.version
        outdated = publication.freshness != self._freshness
        self._freshness = publication.freshness
        changed: list[str] = []
        for entry in publication.snapshot.entries:
            if entry.state is not None:
                self._table.apply(entry.state, now_s, entry.age_s or 0.0)
                if entry.lost_ago_s is not None:
                    self._table.lose(entry.replica_id, now_s - entry.lost_ago_s)
                changed.append(entry.replica_id)
        changed += [state.replica_id for state in self._table.forget(now_s, self._freshness)]
        if outdated:
            self._refresh_all(now_s)
            return
        for replica_id in changed:
            if replica_id in self._columns.index:
                self._refresh(replica_id, now_s)

    def offer(self, peers: Sequence[Peer], now_s: float) -> None:
        """Take over the replicas that Serve offers; requests on any other are forgotten."""
        old = self._columns
        self._columns = Columns(peers, self._node_id)
        self._hints = {peer.replica_id: peer.hint for peer in peers}
        self._in_flight.retain(self._columns.index)
        self.tally.retain(self._columns.index)
        for row, replica_id in enumerate(self._columns.ids):
            if replica_id in old.index:
                known = old.index[replica_id]
                self._columns.note_queue_len(row, old.queue_len[known], old.queue_len_at_s[known])
            self._columns.open_requests[row] = self._in_flight.count(replica_id)
        self._refresh_all(now_s)

    @property
    def serves_full(self) -> bool:
        """Some replica may take requests that insist on full precision, as far as is known."""
        columns = self._columns
        return bool((~columns.gone & (columns.mode != FAST)).any())

    def note_queue_len(self, replica_id: str, queue_len: int, now_s: float) -> None:
        """Serve has heard how many requests a replica has."""
        row = self._columns.index.get(replica_id)
        if row is not None:
            self._columns.note_queue_len(row, queue_len, now_s)

    def decide(
        self, now_s: float, ask: Ask = NO_ASK, *, limit: int, request_id: str | None = None
    ) -> Decision:
        """Order the best ``limit`` replicas for one request; see ``Pipeline.decide``.

        ``request_id`` is the name by which somebody may ask about it later.
        """
        for replica_id in self._in_flight.expire(now_s):
            self._recount(replica_id)
        if now_s >= self._next_change_s:
            for row in np.flatnonzero(self._stale_at_s <= now_s).tolist():
                self._refresh(self._columns.ids[row], now_s)
            self._next_change_s = float(self._stale_at_s.min(initial=np.inf))
        if now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + EXPIRY_PERIOD_S
            self._columns.forget_queue_lens(before_s=now_s - QUEUE_LEN_VALID_S)
        matches = self._prefixes.matches(ask.prefix) if ask.prefix else {}
        decision = self._pipeline.decide(self._columns, ask, matches, limit=limit)
        blind = not self._columns.live.any()
        policy = self._policy.name
        self.tally.note(decision, ask, policy=policy, blind=blind, request_id=request_id)
        dry_run, beside = self._dry_run, self._dry_pipeline
        if dry_run is not None and beside is not None and self._rng.random() < dry_run.share:
            self.tally.compare(decision, self._columns, ask, matches, self._pipeline, beside)
        return decision

    def report(self, router_id: str, application: str | None = None) -> RouterReport:
        """What this router tells the controller about itself."""
        return self.tally.report(
            router_id=router_id,
            application=application,
            node_id=self._node_id,
            policy=self._policy.name,
            version=self.version,
            offered=self._columns.ids,
        )

    def pick(self, request_id: str, replica_id: str, now_s: float) -> None:
        """Count a request against the replica it is about to be sent to."""
        for changed in self._in_flight.pick(request_id, replica_id, now_s):
            self._recount(changed)

    def accept(self, request_id: str, replica_id: str, now_s: float, ask: Ask = NO_ASK) -> None:
        """Note which replica took the request: it may be another than the one picked."""
        for changed in self._in_flight.accept(request_id, replica_id, now_s):
            self._recount(changed)
        if ask.prefix:
            self._prefixes.note(ask.prefix, replica_id)

    def finish(self, request_id: str, replica_id: str, now_s: float) -> None:
        """Forget a request that has left the replica: answered, failed, cancelled or refused."""
        for changed in self._in_flight.finish(request_id, replica_id, now_s):
            self._recount(changed)

    def open_requests(self, replica_id: str) -> int:
        """Requests of this router that are on the replica now."""
        return self._in_flight.count(replica_id)

    def _recount(self, replica_id: str) -> None:
        row = self._columns.index.get(replica_id)
        if row is not None:
            self._columns.open_requests[row] = self._in_flight.count(replica_id)

    def _refresh_all(self, now_s: float) -> None:
        self._stale_at_s = np.full(len(self._columns), np.inf)
        for replica_id in self._columns.ids:
            self._refresh(replica_id, now_s)
        self._next_change_s = float(self._stale_at_s.min(initial=np.inf))

    def _refresh(self, replica_id: str, now_s: float) -> None:
        entry = self._table.entry(replica_id, now_s, self._freshness)
        measured_at_s = now_s - entry.age_s if entry.age_s is not None else now_s
        self._columns.set_entry(
            entry, self._hints[replica_id], self._in_flight.count_at(replica_id, measured_at_s)
        )
        stale_at_s = np.inf
        if entry.standing in (Standing.LIVE, Standing.COLD) and entry.age_s is not None:
            # Just after that moment: an entry is stale when it is older than the limit.
            stale_at_s = np.nextafter(measured_at_s + self._freshness.stale_after_s, np.inf)
        elif entry.lost_ago_s is not None:
            lost_at_s = now_s - entry.lost_ago_s
            stale_at_s = np.nextafter(lost_at_s + self._freshness.stale_after_s, np.inf)
        self._stale_at_s[self._columns.index[replica_id]] = stale_at_s
        self._next_change_s = min(self._next_change_s, float(stale_at_s))
