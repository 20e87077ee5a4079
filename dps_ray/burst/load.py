"""What is sent: one burst of the bundled trace, slowed down until it is worth a new replica."""

import asyncio
from dataclasses import dataclass
from statistics import median

import httpx

from dps_ray.bench.client import ClientOptions, CompletionClient
from dps_ray.bench.prompts import token_id_prompts
from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.bench.replay import replay
from dps_ray.bench.trace_files import read_trace
from dps_ray.bench.traces import (
    TraceRequest,
    from_origin,
    repeat,
    resize,
    speed_up,
    window,
)
from dps_ray.demo.fleet import FleetError
from dps_ray.modes import Floor

WARM_UP_REQUESTS = 4


@dataclass(frozen=True)
class BurstLoad:
    """Window and scaling of the trace.

    The burst lasts eight seconds as it was recorded, less than any replica takes to start, and
    quiet follows. Arrivals keep their pattern ``stretch`` times slower, and lengths fit a context
    of 512 tokens. Each recorded request returns so often that ``open_requests`` are open at once
    on average: how many that takes depends on how fast the machine is.
    """

    trace: str = "azure-2023-code-excerpt"
    start_s: float = 37.0
    end_s: float = 60.0
    stretch: int = 15
    open_requests: int = 8
    """As many as two or three replicas are sized for."""
    prompt_scale: float = 0.05
    max_prompt_tokens: int = 96
    output_scale: float = 10.0
    max_output_tokens: int = 320
    full_every: int = 50
    """Every so many-th request insists on full precision. While a replica holds one it stays in
    full mode, so more of them would leave nothing for fast mode to bridge."""
    seed: int = 0

    def recorded(self) -> list[TraceRequest]:
        """The burst, slowed down; the first arrival is at 0."""
        slower = speed_up(
            window(read_trace(self.trace), self.start_s, self.end_s), 1 / self.stretch
        )
        return resize(
            from_origin(slower),
            prompt_scale=self.prompt_scale,
            max_prompt_tokens=self.max_prompt_tokens,
            output_scale=self.output_scale,
            max_output_tokens=self.max_output_tokens,
        )

    def copies(self, request_s: float) -> int:
        """How often each request must return where one takes ``request_s`` (Little's law)."""
        recorded = self.recorded()
        per_s = len(recorded) / recorded[-1].arrival_s
        return max(1, round(self.open_requests / (per_s * request_s)))

    def requests(self, copies: int) -> list[TraceRequest]:
        """What is sent."""
        return repeat(self.recorded(), copies, self.stretch)


async def measure_request_s(http: httpx.AsyncClient, model: str, load: BurstLoad) -> float:
    """Median time of a request of mean length while a few others run, seconds.

    Raises
    ------
    FleetError
        The fleet does not answer.
    """
    recorded = load.recorded()
    mean = TraceRequest(
        0.0,
        prompt_tokens=round(sum(each.prompt_tokens for each in recorded) / len(recorded)),
        output_tokens=round(sum(each.output_tokens for each in recorded) / len(recorded)),
    )
    client = CompletionClient(http, ClientOptions(model))
    # The first round pays for whatever starts with the first request, such as the router.
    for _ in range(2):
        records = await replay([mean] * WARM_UP_REQUESTS, client, token_id_prompts(load.seed))
    times_s = [record.e2e_s for record in records if record.outcome is Outcome.OK]
    if len(times_s) < len(records):
        raise FleetError(f"the fleet does not answer: {records[0].reason}")
    return median(time_s for time_s in times_s if time_s is not None)


async def send(
    http: httpx.AsyncClient, model: str, trace: list[TraceRequest], load: BurstLoad
) -> list[RequestRecord]:
    """Replay the burst and return what became of each request, in the order of arrival."""
    strict = trace[:: load.full_every]
    others = [request for index, request in enumerate(trace) if index % load.full_every]
    headers = (("X-DPS-Precision", Floor.FULL.value),)
    full = CompletionClient(http, ClientOptions(model, headers=headers))
    groups = await asyncio.gather(
        replay(strict, full, token_id_prompts(load.seed)),
        replay(others, CompletionClient(http, ClientOptions(model)), token_id_prompts(load.seed)),
    )
    return sorted(
        (record for group in groups for record in group), key=lambda record: record.scheduled_s
    )
