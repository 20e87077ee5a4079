"""Every step of an elastic engine written down, and played again on memory that never moves.

The scheduler's orders (which request computes how many tokens in which blocks, masks of grammars,
moves of blocks, the mode) are kept; a static engine's worker gets the same ones, without those
that lend, zero or restore memory. Whatever feature of vLLM shaped the schedule, both must compute
the same to the last bit.
"""

import hashlib
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dps_ray.checks.engine import Engine
from dps_ray.modes import Mode


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


def replay(engine: Engine, *, tape: str) -> dict[str, Any]:
    """Give a static engine's worker the orders of a tape; how many steps differed, and the first.

    The engine needs as many KV blocks as the recorded one had, lent ones included.
    """
    steps: list[Step] = pickle.loads(Path(tape).read_bytes())
    executor = engine.core.model_executor
    compared, different = 0, []
    for number, step in enumerate(steps):
        orders = pickle.loads(step.orders)
        orders.dps = replace(orders.dps, cancel=(), zero=(), restore=())
        output = executor.execute_model(orders)
        if output is None:
            assert step.grammar is not None
            output = executor.sample_tokens(pickle.loads(step.grammar))
            compared += 1
            if _digest(output) != step.digest:
                different.append(number)
    return {"steps": compared, "different": different[:10], "blocks": engine.status.total_blocks}


def _digest(output: Any) -> str:
    logprobs = output.logprobs
    arrays = [] if logprobs is None else [logprobs.logprob_token_ids, logprobs.logprobs]
    text = repr((output.req_ids, output.sampled_token_ids, output.num_nans_in_logits))
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
