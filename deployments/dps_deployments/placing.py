"""One request on its way through a router to a replica."""

from dataclasses import dataclass

from dps_deployments.ray_adapter import PendingRequest, kept_with
from dps_deployments.requests import ask_of
from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.fleet.ask import Ask
from dps_ray.modes import Floor


@dataclass(eq=False)
class Placing:
    """What a router keeps with a request until a replica has taken it."""

    ask: Ask
    offered: bool = False
    """Some replica has been chosen for it."""

    def longest_wait_s(self, options: AdmissionOptions) -> float:
        """How long it may wait in this router, seconds."""
        if self.ask.floor is Floor.FULL:
            return options.longest_full_wait_s(self.ask.wait_s)
        limit_s = options.no_replica_wait_s
        return limit_s if self.ask.wait_s is None else min(limit_s, self.ask.wait_s)


def placing_of(pending_request: PendingRequest) -> Placing:
    """The same for a request at every call.

    Raises
    ------
    BadRequestError
        The request says something that makes no sense.
    """
    return kept_with(pending_request, lambda: Placing(ask_of(pending_request)))
