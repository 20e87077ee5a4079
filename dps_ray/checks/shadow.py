"""An elastic engine under load, and its shadow: the same steps in the same modes on static memory.

The elastic run writes down when requests arrived, which mode each step ran in, and which layers
were full in a fast step. The shadow gets all of it dictated and has memory enough never to lend,
restore or move a block. Their outputs must be equal to the last bit.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dps_ray.checks.engine import Engine
from dps_ray.checks.requests import logprobs_of, prompts
from dps_ray.modes import Mode

FILLER_OUTPUT_TOKENS = 5
"""A burst is over within a few steps, so that a thousand take minutes."""


Precision = tuple[str, Sequence[int]]
"""Mode of a step, and its full layers."""


class _Tape:
    """Counts an engine's steps with tokens in them; records their precision, or dictates it."""

    def __init__(self, engine: Engine, steps: Sequence[Precision] | None = None) -> None:
        self.steps: list[Precision] = []
        self._schedule = engine.scheduler.schedule
        self._dictated = steps
        engine.scheduler.schedule = self._taped

    def _taped(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            if self._dictated is not None:
                mode, layers = self._dictated[len(self.steps)]
                output.dps = replace(output.dps, mode=Mode(mode), full_layers=tuple(layers))
            self.steps.append((output.dps.mode, output.dps.full_layers))
        return output


def cycles_under_load(
    engine: Engine, *, tape: str, count: int, residents: int = 2, fillers: int = 3
) -> dict[str, Any]:
    """Full/fast cycles by real pressure, around long requests that never stop decoding.

    What the shadow must follow goes to the file ``tape``.
    Each cycle starts requests that outgrow base memory and lets them end; the next one starts when
    full mode is back. One of the long requests at a time begins amid a burst, in lent memory.
    """
    taped, arrivals, digests = _Tape(engine), [], {}
    block, base = engine.spec.block_size, engine.status.base_blocks
    filler_tokens = (base + fillers) * block // fillers
    live: dict[str, str] = {}
    status = engine.scheduler.sum_manager.counters

    def start(kind: str, seed: int, tokens: int, max_tokens: int) -> None:
        arrivals.append((len(taped.steps), seed, tokens, max_tokens))
        live[_start(engine, seed, tokens, max_tokens)] = kind

    def running(kind: str) -> int:
        return sum(k == kind for k in live.values())

    finished = 0
    for cycle in range(count):
        seed = cycle * (fillers + residents)
        for index in range(fillers):
            start("filler", seed + index, filler_tokens - block, FILLER_OUTPUT_TOKENS)
        while running("filler") or engine.scheduler.mode is not Mode.FULL:
            if len(taped.steps) >= arrivals[-1][0] + 2 and running("resident") < residents:
                start("resident", seed + fillers, 2 * block, 3 * block)
            for output in engine.step():
                if output.finished:
                    digests[output.request_id] = _digest(output)
                    del live[output.request_id]
        finished += 1
    while live:
        for output in engine.step():
            if output.finished:
                digests[output.request_id] = _digest(output)
                del live[output.request_id]
    engine.return_to_full()
    Path(tape).write_text(json.dumps({"precisions": taped.steps, "arrivals": arrivals}))
    steps = Counter(str(mode) for mode, _ in taped.steps)
    steps["fast with full layers"] = sum(bool(layers) for _, layers in taped.steps)
    return {
        "cycles": finished,
        "steps": steps,
        "digests": list(digests.values()),
        "blocks_moved": status.blocks_moved,
        "units_lent": status.units_lent,
        "switches_to_full": status.switches_to_full,
        "preemptions": engine.preemptions(),
        "ranks": engine.verify_ranks(),
    }


def shadow(engine: Engine, *, tape: str) -> dict[str, Any]:
    """Follow what ``cycles_under_load`` wrote down, on memory that never moves."""
    written = json.loads(Path(tape).read_text())
    waiting: list[list[int]] = list(reversed(written["arrivals"]))
    taped, digests = _Tape(engine, written["precisions"]), {}
    live: set[str] = set()
    while waiting or live:
        while waiting and waiting[-1][0] == len(taped.steps):
            _, seed, tokens, max_tokens = waiting.pop()
            live.add(_start(engine, seed, tokens, max_tokens))
        for output in engine.step():
            if output.finished:
                digests[output.request_id] = _digest(output)
                live.discard(output.request_id)
    return {
        "steps": len(taped.steps),
        "digests": list(digests.values()),
        "preemptions": engine.preemptions(),
    }


def _start(engine: Engine, seed: int, tokens: int, max_tokens: int) -> str:
    (name,) = engine.start(prompts(1, tokens, tokens, seed=seed), max_tokens, logprobs=1)
    return name


def _digest(output: Any) -> str:
    """Of a request's tokens and logprobs, every bit of them."""
    tokens = list(output.outputs[0].token_ids)
    text = repr((output.request_id, tokens, logprobs_of(output)))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
