"""Refuses what a request asks of its precision and cannot have, before the engine takes it in.

An engine can only end such a request as failed, which a client sees as an error of the server.
In the front process it is an error of the request: a ``ValueError``, which vLLM's and Ray's servers
answer with 400.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

from dps_ray.config import DpsConfigError
from dps_ray.engine.floors import PRECISION_ARGUMENT, WAIT_ARGUMENT
from dps_ray.engine.status_page import StatusPage
from dps_ray.modes import Floor


class PrecisionRequestError(VLLMValidationError, ValueError):
    """A request whose wish for precision cannot be met; names the argument, value and remedy."""


@functools.cache
def hook_front() -> None:
    """Check every request where this process, a front of some engine, makes it."""
    stock_process, stock_generate = InputProcessor.process_inputs, AsyncLLM.generate

    @functools.wraps(stock_process)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = stock_process(self, *args, **kwargs)
        tokens = length_from_prompt_token_ids_or_embeds(
            request.prompt_token_ids, request.prompt_embeds
        )
        refuse_unservable(
            self.vllm_config, request.sampling_params, tokens, grows=request.resumable
        )
        return request

    # A server has sent its status line before it first asks a stream's generator for anything.
    @functools.wraps(stock_generate)
    def generate(self: AsyncLLM, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any):
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        refuse_unservable(self.vllm_config, sampling_params, len(ids or ()))
        return stock_generate(self, prompt, sampling_params, *args, **kwargs)

    InputProcessor.process_inputs = process_inputs
    AsyncLLM.generate = generate


def refuse_unservable(
    config: VllmConfig, params: Any, prompt_tokens: int, *, grows: bool = False
) -> None:
    """Refuse wrong arguments, and full precision for a prompt that the base KV blocks cannot hold.

    Parameters
    ----------
    config
        The engine's configuration; one that is not elastic takes every request.
    params
        Sampling parameters; other kinds have no precision floor.
    prompt_tokens
        Length of the prompt; 0 where it is not known yet.
    grows
        Whether the prompt comes piece by piece.

    Raises
    ------
    PrecisionRequestError
        One line with argument, value and remedy.
    """
    key = config.additional_config.get("dps", {}).get("key") if config.additional_config else None
    extra = getattr(params, "extra_args", None)
    if key is None or not extra:
        return
    floor, wait_s = extra.get(PRECISION_ARGUMENT), extra.get(WAIT_ARGUMENT)
    if floor is not None and floor not in tuple(Floor):
        raise _refusal(PRECISION_ARGUMENT, floor, f"give one of {', '.join(Floor)}")
    if wait_s is not None and not _is_duration(wait_s):
        raise _refusal(WAIT_ARGUMENT, wait_s, "give seconds, such as 2.5")
    if floor != Floor.FULL:
        return
    if grows:
        raise _refusal(
            PRECISION_ARGUMENT,
            floor,
            "a prompt that comes piece by piece may outgrow full precision; give it whole, or let "
            "it run in any precision",
        )
    limit = _full_request_tokens(key)
    if limit is not None and prompt_tokens >= limit:
        raise _refusal(
            PRECISION_ARGUMENT,
            floor,
            f"no memory is lent under such a request, and the base KV blocks hold {limit} tokens "
            f"of prompt and output together, this prompt has {prompt_tokens}; shorten it, let it "
            "run in any precision, or raise the engine's kv_cache_memory_bytes",
        )


def _refusal(argument: str, value: object, remedy: str) -> PrecisionRequestError:
    return PrecisionRequestError(f"{argument} is {str(value)[:40]!r}: {remedy}")


def _is_duration(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < math.inf
    )


_LIMITS: dict[str, int] = {}
"""Longest request in full precision, by engine: it never changes, once it is known."""


def _full_request_tokens(key: str) -> int | None:
    """Longest request in full precision; ``None`` for an engine whose page is not on this host."""
    if key not in _LIMITS:
        try:
            page = StatusPage.attach(key)
        except DpsConfigError:
            return None
        try:
            status = page.read()
        finally:
            page.close()
        if status is None:
            return None
        _LIMITS[key] = status.full_request_tokens
    return _LIMITS[key]
