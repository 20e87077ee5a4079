"""A process that scores texts on plain vLLM and on the default kernel, and watches their experts.

It writes how far the logprobs are from each other up to the first token of each text that went to
other experts, by how much the chosen expert's logit was ahead there on plain vLLM, and by how much
it is ahead as a rule.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from dps_ray.checks.engine import engine
from dps_ray.checks.requests import prompts
from dps_ray.checks.specs import AMPLE_KV_BYTES, AUTO, EngineSpec
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

TEXTS, TOKENS, TOP_K = 8, 96, 2

Scored = tuple[list[float], list[torch.Tensor]]
"""Logprob of each token but the first, and each layer's router logits ``[tokens, experts]``."""


def score(dps: dict[str, Any] | None) -> list[Scored]:
    folder = make_tiny("qwen3-moe", cache_root(), dtype="bfloat16")
    spec = EngineSpec(
        label="routed",
        model=str(folder),
        kv_bytes=AMPLE_KV_BYTES,
        dps=dps,
        enable_prefix_caching=False,
    )
    found: list[Scored] = []
    logits: list[torch.Tensor] = []

    def watched(stock: Any, x: torch.Tensor) -> Any:
        result = stock(x)
        logits.append(result[0].float())
        return result

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with engine(spec) as running:
        layers = running.core.model_executor.driver_worker.worker.model_runner.model.model.layers
        for layer in layers:
            layer.mlp.gate.forward = partial(watched, layer.mlp.gate.forward)
        for number, text in enumerate(prompts(TEXTS, TOKENS, TOKENS)):
            logits.clear()
            name = f"text-{number}"
            running.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=text), params)
            steps = running.finish([name])[name].prompt_logprobs[1:]
            scores = [step[token].logprob for step, token in zip(steps, text[1:], strict=True)]
            found.append((scores, [each[:TOKENS] for each in logits[: len(layers)]]))
    return found


def compare(plain: list[Scored], other: list[Scored]) -> dict[str, Any]:
    compared, distance, gaps = 0, 0.0, []
    for (scores, layers), (other_scores, other_layers) in zip(plain, other, strict=True):
        for token, (one, another) in enumerate(zip(scores, other_scores, strict=True)):
            pairs = [(a[token], b[token]) for a, b in zip(layers, other_layers, strict=True)]
            split = [a for a, b in pairs if _experts(a) != _experts(b)]
            if split:
                gaps.append(float(_lead(split[0])))
                break
            compared += 1
            distance = max(distance, abs(one - another))
    usual = torch.cat([_lead(layer) for _, layers in plain for layer in layers]).median()
    return {"compared": compared, "distance": distance, "gaps": gaps, "usual_gap": float(usual)}


def _lead(logits: torch.Tensor) -> torch.Tensor:
    """Of the last chosen expert over the first that is not."""
    best = logits.topk(TOP_K + 1).values
    return best[..., TOP_K - 1] - best[..., TOP_K]


def _experts(logits: torch.Tensor) -> set[int]:
    return set(logits.topk(TOP_K).indices.tolist())


if __name__ == "__main__":
    answer = compare(score(None), score({**AUTO, "lend": False}))
    Path(sys.argv[1]).write_text(json.dumps(answer))
