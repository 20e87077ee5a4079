"""Lets an engine make its first tokens before it is called ready."""

from typing import Any

from vllm import SamplingParams

TOKENS = 2
"""One of a prefill, one of a decode."""


async def warm_up(client: Any) -> None:
    """Run a short request through an engine: its first step loads code for seconds.

    One that generates nothing (embeddings, scores, transcription) is left as it is.

    Parameters
    ----------
    client
        vLLM's ``AsyncLLM``.
    """
    if "generate" not in await client.get_supported_tasks():
        return
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [0] * TOKENS}
    async for _ in client.generate(prompt, params, request_id="dps-warm-up"):
        pass
