"""Every step of an elastic engine written down, and played again on memory that never moves.

The scheduler's orders (which request computes how many tokens in which blocks, masks of grammars,
moves of blocks, the mode) are kept; a static engine's worker gets the same ones, without those
that lend, zero or restore memory. Whatever feature of vLLM shaped the schedule, both must compute
the same to the last bit.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dps_ray.checks.engine import Engine
from dps_ray.engine import rank as ranks
from dps_ray.modes import Mode

Spoil = Callable[[int, Any], None]
"""Changes something about one step: given its number and its orders, before they are played."""


@dataclass
class Step:
    """One call of the model."""

    orders: bytes
    """vLLM's ``SchedulerOutput``, pickled when it was given: the scheduler goes on using parts."""
    grammar: bytes | None = None
    digest: str = ""
    """Of tokens, logprobs and NaN counts, every bit of them."""


class Recorder:
    """Writes down what an engine's executor is told and answers."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[Step] = []
        executor = engine.core.model_executor
        self._execute, self._sample = executor.execute_model, executor.sample_tokens
        executor.execute_model, executor.sample_tokens = self._executed, self._sampled

    def save(self, path: str) -> None:
        Path(path).write_bytes(pickle.dumps(self.steps))

    def scheduled(self) -> list[tuple[Any, Mode]]:
        """The orders of all steps with tokens in them, and the modes of these steps."""
        orders = [pickle.loads(step.orders) for step in self.steps]
        return [(each, each.dps.mode) for each in orders if each.total_num_scheduled_tokens]

    def _executed(self, orders: Any, non_block: bool = False) -> Any:
        self.steps.append(Step(pickle.dumps(orders)))
        return self._execute(orders, non_block)

    def _sampled(self, grammar: Any, non_block: bool = False) -> Any:
        output = self._sample(grammar, non_block)
        step = self.steps[-1]
        step.grammar, step.digest = pickle.dumps(grammar), _digest(output)
        return output


def replay(engine: Engine, *, tape: str, controls: bool = False) -> dict[str, Any]:
    """Give a static engine's worker the orders of a tape; how many steps differed, and the first.

    The engine needs as many KV blocks as the recorded one had, lent ones included. With
    ``controls`` the tape is played again with one deliberate difference, once for each kind, as
    far as it takes to notice it.
    """
    steps: list[Step] = pickle.loads(Path(tape).read_bytes())
    compared, different = _play(engine, steps)
    result = {
        "steps": compared,
        "different": different[:10],
        "blocks": engine.status.total_blocks,
    }
    if controls:
        block, reader = _block_and_reader(steps)
        result["noticed"] = {
            name: _play(engine, steps, spoil)[1][:1] >= [reader]
            for name, spoil in _differences(block, reader)
        }
    return result


def _play(engine: Engine, steps: list[Step], spoil: Spoil | None = None) -> tuple[int, list[int]]:
    """Steps compared, and those that differed; a spoiled tape ends at the first."""
    requests = {
        new.req_id for step in steps for new in pickle.loads(step.orders).scheduled_new_reqs
    }
    executor = engine.core.model_executor
    compared, different = 0, []
    for number, step in enumerate(steps):
        orders = pickle.loads(step.orders)
        orders.dps = replace(orders.dps, cancel=(), zero=(), restore=())
        if number == 0:
            # A spoiled play before this one ended amid its requests.
            orders.finished_req_ids |= requests
        if spoil is not None:
            spoil(number, orders)
        output = executor.execute_model(orders)
        if output is None:
            assert step.grammar is not None
            output = executor.sample_tokens(pickle.loads(step.grammar))
            compared += 1
            if _digest(output) != step.digest:
                different.append(number)
                if spoil is not None:
                    break
    return compared, different


def _differences(block: int, reader: int) -> Iterator[tuple[str, Spoil]]:
    """One step in the other mode; one KV block with other signs, before a step that reads it."""

    def other_mode(number: int, orders: Any) -> None:
        if number == reader:
            mode = Mode.FAST if orders.dps.mode is Mode.FULL else Mode.FULL
            orders.dps = replace(orders.dps, mode=mode)

    def other_block(number: int, orders: Any) -> None:
        if number == reader:
            memory = ranks.current().memory
            assert memory is not None
            memory.region.block_view(block).bitwise_xor_(0x80)

    yield "a step in the other mode", other_mode
    yield "a KV block with other signs", other_block


def _block_and_reader(steps: list[Step]) -> tuple[int, int]:
    """The newest block of the first request, and the number of the next step that reads it."""
    first: Any = None
    for number, step in enumerate(steps):
        orders = pickle.loads(step.orders)
        if first is not None and first.req_id in orders.num_scheduled_tokens:
            return first.block_ids[0][-1], number
        if first is None and orders.scheduled_new_reqs:
            first = orders.scheduled_new_reqs[0]
    raise ValueError("no request on the tape took two steps")


def _digest(output: Any) -> str:
    logprobs = output.logprobs
    arrays = [] if logprobs is None else [logprobs.logprob_token_ids, logprobs.logprobs]
    text = repr((output.req_ids, output.sampled_token_ids, output.num_nans_in_logits))
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
