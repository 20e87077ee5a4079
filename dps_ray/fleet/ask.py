"""What routing has to know about one request."""

from dataclasses import dataclass

from dps_ray.modes import Floor


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as a policy sees it."""

    floor: Floor = Floor.ANY
    session: str | None = None
    """Requests of one session should meet on one replica, where their prefixes are cached."""
    prefix: tuple[int, ...] = ()
    """Hashes of the prompt's leading chunks, each over everything up to its end; shortest
    first."""
    wait_s: float | None = None
    """How long the request is willing to wait to be placed, seconds."""
