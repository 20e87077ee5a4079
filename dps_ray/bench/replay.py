"""Open-loop replay: every request is sent at its trace time, however slow the server is."""

import asyncio
import time
from collections.abc import Callable, Sequence

from dps_ray.bench.client import CompletionClient
from dps_ray.bench.prompts import PromptMaker
from dps_ray.bench.records import RequestRecord
from dps_ray.bench.traces import TraceRequest


async def replay(
    trace: Sequence[TraceRequest],
    client: CompletionClient,
    prompts: PromptMaker,
    *,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestRecord]:
    """Replay a trace and wait until its last request has ended.

    Parameters
    ----------
    trace
        Requests with arrivals in seconds after the start of the replay.
    client
        Where they go.
    prompts
        Makes each prompt; called before the replay starts.
    on_end
        Called with every record as its request ends.
    clock
        The same monotonic clock as the client's, seconds.

    Returns
    -------
    list of RequestRecord
        In the trace's order.
    """
    texts = [prompts(index, request.prompt_tokens) for index, request in enumerate(trace)]
    origin_s = clock()

    async def one(index: int, request: TraceRequest) -> RequestRecord:
        # Sleeping towards an absolute time keeps a late start from shifting all later arrivals.
        await asyncio.sleep(max(0.0, origin_s + request.arrival_s - clock()))
        record = RequestRecord(
            index=index,
            scheduled_s=request.arrival_s,
            sent_s=clock() - origin_s,
            requested_output_tokens=request.output_tokens,
        )
        await client.complete(record, texts[index], origin_s)
        on_end(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, request)) for index, request in enumerate(trace)]
    return [task.result() for task in tasks]
