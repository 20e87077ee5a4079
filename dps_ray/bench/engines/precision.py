"""How far the next-token distributions of an engine's passes are from the 16-bit model's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from dps_ray.checks.engine import Engine


@dataclass(frozen=True)
class Rows:
    """Log-probabilities that one call of the output head has made."""

    requests: tuple[str, ...]
    """Requests of the batch, in the order of their rows where each has one."""
    logprobs: torch.Tensor
    """float32 ``[rows, vocabulary]``."""


@contextmanager
def watched(engine: Engine) -> Iterator[list[Rows]]:
    """Keep what the output head computes inside the block; the model is in this process."""
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    kept: list[Rows] = []
    stock = runner.model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = stock(*args, **kwargs)
        kept.append(Rows(tuple(runner.input_batch.req_ids), logits.float().log_softmax(-1)))
        return logits

    runner.model.compute_logits = compute_logits
    try:
        yield kept
    finally:
        del runner.model.compute_logits


def write(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[Any]:
    """Continue each prompt by ``tokens`` sampled tokens; prompts and continuations."""
    inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)
    outputs = engine.llm.generate(inputs, params, use_tqdm=False)
    return [
        [*prompt, *output.outputs[0].token_ids]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def score(engine: Engine, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities after each of ``tokens`` but the last, ``[len(tokens) - 1, vocabulary]``.

    All tokens must fit one step.
    """
    with watched(engine) as kept:
        engine.llm.generate(
            TokensPrompt(prompt_token_ids=list(tokens)),
            SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
    rows = max(kept, key=lambda call: len(call.logprobs)).logprobs
    if len(rows) != len(tokens) - 1:
        raise RuntimeError(f"{len(tokens)} tokens gave {len(rows)} distributions: several steps")
    return rows


def divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of each row of ``other`` from ``reference``, nats."""
    return (reference.exp() * (reference - other)).sum(-1)
