"""Seeded requests for the tiny models, and their outputs to the last bit."""

import random
from typing import Any

VOCABULARY = 480
"""Token ids below this exist in every tiny model."""
EVERY = 10
"""One request in so many of a check of precision floors insists on full precision."""


def prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Seeded prompts of random token ids, ``count`` of them."""
    rng = random.Random(seed)
    return [
        [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(shortest, longest))]
        for _ in range(count)
    ]


def floor_prompts(count: int) -> list[list[int]]:
    """Prompts behind one prefix, which prefix caches may hold in either precision.

    One in ``EVERY`` is sent with the precision floor ``full``; see ``insists``.
    """
    shared, tails = prompts(1, 64, 64)[0], prompts(count, 20, 60, seed=1)
    return [shared + tail for tail in tails]


def insists(number: int) -> bool:
    """Whether a prompt of ``floor_prompts`` is sent with the precision floor ``full``."""
    return number % EVERY == 0


def logprobs_of(output: Any) -> list[list[tuple[int, str]]]:
    """Logprobs of a finished request, step by step, exact to the bit."""
    return [
        sorted((token, value.logprob.hex()) for token, value in step.items())
        for step in output.outputs[0].logprobs
    ]


def same_outputs(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results of ``generate`` have the same tokens and logprobs, to the last bit."""
    return bool(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"])


def logprob_distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of a logprob between two results of ``generate``.

    Each request is compared up to the first step at which the two chose different tokens: until
    then both saw the same text. In a step the tokens among the best of both count.
    """
    worst = 0.0
    requests = zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True)
    for tokens, other_tokens, steps, other_steps in requests:
        for token, other_token, step, other_step in zip(
            tokens, other_tokens, steps, other_steps, strict=True
        ):
            values, others = (
                {key: float.fromhex(value) for key, value in each} for each in (step, other_step)
            )
            common = values.keys() & others.keys()
            worst = max([worst, *(abs(values[key] - others[key]) for key in common)])
            if token != other_token:
                break
    return worst
