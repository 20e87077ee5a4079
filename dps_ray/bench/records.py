"""What the load generator knows about one request after it ended."""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    """An error, a broken stream, a time-out or an empty answer."""
    REJECTED = "rejected"
    """The server refused it for lack of capacity (HTTP 429 or 503)."""


@dataclass(slots=True)
class RequestRecord:
    """One request; all times are seconds after the start of the replay."""

    index: int
    scheduled_s: float
    """When the trace says it arrives."""
    sent_s: float
    requested_output_tokens: int
    outcome: Outcome = Outcome.FAILED
    reason: str | None = None
    """Why it failed or was rejected; ``None`` when it did not."""
    chunk_times_s: list[float] = field(default_factory=list)
    """Arrival of every streamed piece of text; a server may put several tokens into one."""
    end_s: float | None = None
    prompt_tokens: int | None = None
    """As the server counted them; ``None`` when it did not say."""
    output_tokens: int | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, seconds from the scheduled arrival, so that a generator running
        late cannot hide a slow server."""
        return self.chunk_times_s[0] - self.scheduled_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """End-to-end latency, seconds from the scheduled arrival."""
        return None if self.end_s is None else self.end_s - self.scheduled_s

    @property
    def itl_s(self) -> list[float]:
        """Times between neighbouring pieces, seconds."""
        return [after - before for before, after in pairwise(self.chunk_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, seconds; ``None`` below two tokens."""
        if not self.chunk_times_s or self.output_tokens is None or self.output_tokens < 2:
            return None
        span_s = self.chunk_times_s[-1] - self.chunk_times_s[0]
        return span_s / (self.output_tokens - 1)
