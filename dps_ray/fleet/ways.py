"""Which way a call to the controller takes: directly to its own port, or by Serve's handle."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dps_ray.fleet.backoff import Backoff

TIMEOUTS_BEFORE_ASKING = 3


@dataclass(frozen=True, slots=True)
class Access:
    """Where one controller process takes calls directly, and what lets a call in."""

    url: str
    secret: str = field(repr=False)


class Ways:
    """One caller's knowledge of the direct way.

    An access is learned by the handle and used until it fails. One that has worked before may have
    outlived its controller, so the handle is asked again at once. One that has never worked, though
    the handle has just named it, is closed to this caller: calls go by the handle, and it is asked
    again later.

    Parameters
    ----------
    clock
        Monotonic seconds.
    pauses
        How long the direct way is left alone after each such failure in a row.
    """

    def __init__(self, clock: Callable[[], float], pauses: Backoff) -> None:
        self._clock = clock
        self._pauses = pauses
        self._access: Access | None = None
        self._proven = False
        self._misses = self._timeouts = 0
        self._closed_until_s = float("-inf")

    @property
    def access(self) -> Access | None:
        """The direct way; ``None`` while calls go by the handle."""
        return self._access

    @property
    def should_ask(self) -> bool:
        """Whether the handle has to be asked for an access before the next call."""
        return self._access is None and self._clock() >= self._closed_until_s

    def told(self, access: Access | None) -> None:
        """Take in the handle's answer; ``None``: the controller takes no direct calls."""
        self._access, self._proven = access, False
        if access is None:
            self._close()

    def reached(self) -> None:
        """A direct call was answered."""
        self._proven = True
        self._misses = self._timeouts = 0
        self._pauses.succeeded()

    def lost(self, access: Access) -> bool:
        """A direct call found no controller behind an access; whether the way counts as closed now.

        Not at the first time: a caller whose own loop stood still was too late as well.
        """
        if access != self._access:
            return False
        self._access = None
        if self._proven:
            self._proven = False
            return False
        self._misses += 1
        self._close()
        return self._misses > 1

    def unanswered(self) -> None:
        """A call was not answered in time.

        A controller that answered here before is slow: asking for its access would be one more call
        to it. After some times in a row it may be another's turn. Where nobody ever answered the
        network may swallow what is sent.
        """
        if self._access is None:
            return
        self._timeouts += 1
        if not self._proven or self._timeouts >= TIMEOUTS_BEFORE_ASKING:
            self._timeouts = 0
            self.lost(self._access)

    def _close(self) -> None:
        self._closed_until_s = self._clock() + self._pauses.failed()
