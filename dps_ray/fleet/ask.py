"""What routing has to know about one request."""

from dataclasses import dataclass
from enum import StrEnum


class Floor(StrEnum):
    """Lowest precision a request accepts (header ``X-DPS-Precision``)."""

    ANY = "any"
    PREFER_FULL = "prefer-full"
    """Full mode where there is some; fast mode rather than waiting."""
    FULL = "full"
    """Full mode or no answer."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as a policy sees it."""

    floor: Floor = Floor.ANY
    session: str | None = None
    """Requests of one session should meet on one replica, where their prefixes are cached."""
    prefix: tuple[int, ...] = ()
    """Hashes of the prompt's leading chunks, each over everything up to its end; shortest
    first."""
