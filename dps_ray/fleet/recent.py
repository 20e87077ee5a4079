"""A router's latest decisions by request, so that somebody can ask about one afterwards."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.decision import Decision
from dps_ray.fleet.routing import Reason, Tier
from dps_ray.modes import Floor

MAX_REQUESTS = 4096
MAX_CANDIDATES = 2**18
"""Over all decisions kept: 4,096 among 64 replicas, 262 among 1,000."""
MAX_ID_CHARS = 128
"""So much of a request's id is looked at: clients may choose them."""
BRIEF = 8


class Told(BaseModel):
    """One decision with its reasons, in the form in which it leaves the router."""

    time_s: float
    """Wall clock, seconds since the epoch."""
    request_id: str | None = None
    """As the client knows it: the header ``X-Request-ID`` of its request or of the response."""
    policy: str | None = None
    floor: Floor
    session: bool
    prefix_chunks: int
    order: tuple[str, ...]
    probe: bool
    accepted_by: str | None = None
    """The replica that took the request; ``None`` while none has."""
    decisions: int = 1
    """Decisions for this request; the reasons are those of the latest."""
    reasons: tuple[Reason, ...]


@dataclass(slots=True)
class Kept:
    """One decision as the router keeps it."""

    time_s: float
    policy: str
    ask: Ask
    decision: Decision
    decisions: int = 1
    accepted_by: str | None = None

    def told(self, request_id: str | None = None) -> Told:
        """The decision with the reasons of all candidates."""
        return self._told(self.decision.reasons(), request_id=request_id)

    def brief(self) -> Told:
        """The same with the best candidates and the first of those that are left out."""
        reasons = self.decision.reasons()
        best = [reason for reason in reasons if reason.tier is not Tier.EXCLUDED]
        excluded = [reason for reason in reasons if reason.tier is Tier.EXCLUDED]
        return self._told((*best[:BRIEF], *excluded[:BRIEF]))

    def _told(self, reasons: tuple[Reason, ...], **more: Any) -> Told:
        return Told(
            time_s=self.time_s,
            policy=self.policy,
            floor=self.ask.floor,
            session=self.ask.session is not None,
            prefix_chunks=len(self.ask.prefix),
            order=self.decision.order,
            probe=self.decision.probe,
            accepted_by=self.accepted_by,
            decisions=self.decisions,
            reasons=reasons,
            **more,
        )


class RecentDecisions:
    """The latest decisions, as many as fit the bounds."""

    def __init__(
        self, max_requests: int = MAX_REQUESTS, max_candidates: int = MAX_CANDIDATES
    ) -> None:
        self._max_requests = max_requests
        self._max_candidates = max_candidates
        self._candidates = 0
        self._kept: dict[str, Kept] = {}

    def note(self, request_id: str, kept: Kept) -> None:
        """Keep a decision; an earlier one for the same request is replaced and counted."""
        request_id = request_id[:MAX_ID_CHARS]
        earlier = self._drop(request_id)
        if earlier is not None:
            kept.decisions += earlier.decisions
        self._kept[request_id] = kept
        self._candidates += len(kept.decision.candidates)
        while len(self._kept) > self._max_requests or self._candidates > self._max_candidates:
            self._drop(next(iter(self._kept)))

    def accepted(self, request_id: str, replica_id: str) -> None:
        """A replica has taken the request."""
        kept = self._kept.get(request_id[:MAX_ID_CHARS])
        if kept is not None:
            kept.accepted_by = replica_id

    def find(self, request_id: str) -> Told | None:
        """The decision about a request, if it is still kept."""
        kept = self._kept.get(request_id[:MAX_ID_CHARS])
        return None if kept is None else kept.told(request_id)

    def _drop(self, request_id: str) -> Kept | None:
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._candidates -= len(kept.decision.candidates)
        return kept
