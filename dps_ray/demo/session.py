"""One run of the demo against a ready fleet: warm-up, replay and sampling side by side."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from dps_ray.bench.client import ClientOptions, CompletionClient, open_http
from dps_ray.bench.fleet_samples import FleetSample, parse_status
from dps_ray.bench.prompts import token_id_prompts
from dps_ray.bench.records import Outcome, RequestRecord
from dps_ray.bench.replay import replay
from dps_ray.bench.slo import percentiles
from dps_ray.bench.traces import TraceRequest
from dps_ray.demo.load import warm_up
from dps_ray.modes import Mode

SAMPLE_PERIOD_S = 0.5
SEED = 20231116


@dataclass(frozen=True)
class Session:
    """What one run measured."""

    records: list[RequestRecord]
    samples: list[FleetSample]
    missed_samples: int
    """Readings that the controller did not answer."""
    t_base_ms: float
    """99th percentile of the gap between two tokens in the warm-up, milliseconds."""


class DemoError(RuntimeError):
    """The fleet started, but does not serve."""


async def run_session(
    url: str,
    model: str,
    trace: list[TraceRequest],
    replicas: int,
    *,
    settle_s: float,
    show: Callable[[FleetSample, str], None],
) -> Session:
    """Replay ``trace`` while sampling the controller.

    Parameters
    ----------
    url
        Root of the fleet's HTTP server.
    model
        Model name.
    trace
        Requests to send.
    replicas
        Number of replicas.
    settle_s
        Longest time after the last answer to wait for full mode, seconds.
    show
        Called with every sample and a line about the requests.

    Raises
    ------
    DemoError
        The warm-up failed.
    """
    async with open_http(url) as http:
        client = CompletionClient(http, ClientOptions(model))
        t_base_ms = await _measure_t_base(client, replicas)
        sampler = _Sampler(http, len(trace), show)
        watching = asyncio.create_task(sampler.watch())
        try:
            records = await replay(
                trace, client, token_id_prompts(SEED), on_end=sampler.count_request
            )
            deadline_s = time.perf_counter() + settle_s
            while not sampler.all_full() and time.perf_counter() < deadline_s:
                await asyncio.sleep(SAMPLE_PERIOD_S)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        if not watching.cancelled():
            watching.result()
        return Session(records, sampler.samples, sampler.missed, t_base_ms)


async def _measure_t_base(client: CompletionClient, replicas: int) -> float:
    records = await replay(warm_up(replicas), client, token_id_prompts(SEED + 1))
    failures = [record.reason for record in records if record.outcome is not Outcome.OK]
    if failures:
        raise DemoError(f"the fleet does not answer: {failures[0]}")
    gaps = percentiles(gap for record in records for gap in record.itl_s)
    if gaps is None:
        raise DemoError("the fleet answers without streaming: no gap between tokens was seen")
    return gaps.p99_ms


class _Sampler:
    def __init__(
        self, http: httpx.AsyncClient, total: int, show: Callable[[FleetSample, str], None]
    ) -> None:
        self.samples: list[FleetSample] = []
        self.missed = 0
        self._http = http
        self._total = total
        self._show = show
        self._ended = 0
        self._lost = 0
        self._origin_s = time.perf_counter()

    def count_request(self, record: RequestRecord) -> None:
        self._ended += 1
        self._lost += record.outcome is not Outcome.OK

    def all_full(self) -> bool:
        """Whether the latest sample shows every replica in full mode with nothing to restore."""
        states = self.samples[-1].states.values() if self.samples else ()
        return bool(states) and all(
            state.mode is Mode.FULL and not state.restoring for state in states
        )

    async def watch(self) -> None:
        while True:
            try:
                response = await self._http.get("/dps/status", timeout=2.0)
                response.raise_for_status()
            except httpx.HTTPError:
                self.missed += 1
            else:
                sample = parse_status(response.json(), time.perf_counter() - self._origin_s)
                self.samples.append(sample)
                progress = f"{self._ended}/{self._total} answered, {self._lost} failed"
                self._show(sample, progress)
            await asyncio.sleep(SAMPLE_PERIOD_S)
