"""Latency percentiles and attainment of service-level objectives."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite

import numpy as np

from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.config import DpsConfigError


@dataclass(frozen=True)
class Percentiles:
    """Distribution of one latency, milliseconds."""

    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


def percentiles(values_s: Iterable[float | None]) -> Percentiles | None:
    """Summarise latencies given in seconds; ``None`` where there is no value at all."""
    known = np.array([value for value in values_s if value is not None]) * 1000.0
    if known.size == 0:
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(known, [50, 95, 99]))
    return Percentiles(int(known.size), float(known.mean()), p50, p95, p99, float(known.max()))


@dataclass(frozen=True)
class SloTarget:
    """What a request must meet, after the paper's section V and Sarathi-Serve (OSDI 2024).

    A request attains the objective when its first token comes within ``ttft_ms`` and no later gap
    is above ``tbt_factor * t_base_ms``.
    """

    ttft_ms: float = 2000.0
    t_base_ms: float = 40.0
    """Decode step without interference, p99, milliseconds: measure it on the 16-bit model. The
    paper uses a batch of 32 requests with 4k tokens of context."""
    tbt_factor: float = 5.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (isfinite(value) and value > 0):
                raise DpsConfigError(f"SLO {name} is {value}: give a number above 0")

    @property
    def max_tbt_ms(self) -> float:
        return self.tbt_factor * self.t_base_ms

    def attained(self, record: RequestRecord) -> bool:
        """Whether one request met both limits; a failed or rejected one never does."""
        ttft_s = record.ttft_s
        if record.outcome is not Outcome.OK or ttft_s is None:
            return False
        slowest_s = max(record.itl_s, default=0.0)
        return ttft_s * 1000.0 <= self.ttft_ms and slowest_s * 1000.0 <= self.max_tbt_ms


@dataclass(frozen=True)
class SloResult:
    """Attainment over all requests sent; failures and rejections count as misses."""

    attainment: float
    """Share of requests that met both limits, 0 to 1."""
    ttft_attainment: float
    tbt_attainment: float
    goodput_rps: float
    """Requests per second that met both limits."""


def evaluate(records: Sequence[RequestRecord], target: SloTarget, duration_s: float) -> SloResult:
    """Measure attainment.

    Parameters
    ----------
    records
        Every request that was sent, not the successful ones alone.
    target
        The limits.
    duration_s
        From the first arrival to the last end, seconds.

    Raises
    ------
    ValueError
        There is no record.
    """
    if not records:
        raise ValueError("no request was sent: attainment is undefined")
    met = sum(target.attained(record) for record in records)
    ttft_only = SloTarget(target.ttft_ms, t_base_ms=1e12)
    tbt_only = SloTarget(1e12, target.t_base_ms, target.tbt_factor)
    return SloResult(
        attainment=met / len(records),
        ttft_attainment=sum(map(ttft_only.attained, records)) / len(records),
        tbt_attainment=sum(map(tbt_only.attained, records)) / len(records),
        goodput_rps=met / duration_s if duration_s > 0 else 0.0,
    )
