"""Seeded requests for the tiny models, and their outputs to the last bit."""

import random
from typing import Any

VOCABULARY = 480
"""Token ids below this exist in every tiny model."""


def prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Seeded prompts of random token ids, ``count`` of them."""
    rng = random.Random(seed)
    return [
        [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(shortest, longest))]
        for _ in range(count)
    ]


def logprobs_of(output: Any) -> list[list[tuple[int, str]]]:
    """Logprobs of a finished request, step by step, exact to the bit."""
    return [
        sorted((token, value.logprob.hex()) for token, value in step.items())
        for step in output.outputs[0].logprobs
    ]
