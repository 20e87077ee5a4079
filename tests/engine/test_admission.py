"""What a request may ask of its precision, checked before the engine sees it."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.v1.engine.async_llm import AsyncLLM

from dps_ray.engine.admission import PrecisionRequestError, hook_front, refuse_unservable
from dps_ray.engine.status_page import StatusPage

from .test_status_page import a_status

LIMIT_TOKENS = 100


@pytest.fixture
def config() -> Iterator[Any]:
    """Configuration of an elastic engine that runs on this host."""
    key = uuid.uuid4().hex
    page = StatusPage.create(key)
    page.publish(replace(a_status(), full_request_tokens=LIMIT_TOKENS))
    yield SimpleNamespace(additional_config={"dps": {"key": key}})
    page.remove()


def params(**extra: Any) -> SamplingParams:
    return SamplingParams(extra_args=extra)


def test_full_precision_for_a_prompt_that_fills_the_base_blocks_is_refused(config: Any) -> None:
    refuse_unservable(config, params(dps_precision="full"), LIMIT_TOKENS - 1)
    refuse_unservable(config, params(dps_precision="prefer-full"), LIMIT_TOKENS)
    with pytest.raises(ValueError, match="dps_precision") as refusal:
        refuse_unservable(config, params(dps_precision="full"), LIMIT_TOKENS)
    assert str(refusal.value) == (
        "dps_precision is 'full': no memory is lent under such a request, and the base KV blocks "
        "hold 100 tokens of prompt and output together, this prompt has 100; shorten it, let it "
        "run in any precision, or raise the engine's kv_cache_memory_bytes"
    )
    assert create_error_response(refusal.value).error.code == 400


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"dps_precision": "half"},
            "dps_precision is 'half': give one of any, prefer-full, full",
        ),
        ({"dps_wait_s": "soon"}, "dps_wait_s is 'soon': give seconds, such as 2.5"),
        ({"dps_wait_s": -1}, "dps_wait_s is '-1': give seconds, such as 2.5"),
        ({"dps_wait_s": float("nan")}, "dps_wait_s is 'nan': give seconds, such as 2.5"),
        ({"dps_wait_s": True}, "dps_wait_s is 'True': give seconds, such as 2.5"),
    ],
)
def test_wrong_argument_is_named_with_its_value(
    config: Any, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(PrecisionRequestError) as refusal:
        refuse_unservable(config, params(**extra), 1)
    assert str(refusal.value) == message


def test_full_precision_for_a_prompt_that_grows_is_refused(config: Any) -> None:
    refuse_unservable(config, params(dps_precision="any"), 1, grows=True)
    with pytest.raises(PrecisionRequestError, match="comes piece by piece"):
        refuse_unservable(config, params(dps_precision="full"), 1, grows=True)


def test_engine_without_dps_takes_every_request() -> None:
    plain = SimpleNamespace(additional_config={})
    refuse_unservable(plain, params(dps_precision="half"), 10**9)


def test_engine_on_another_host_keeps_its_own_limit() -> None:
    elsewhere = SimpleNamespace(additional_config={"dps": {"key": uuid.uuid4().hex}})
    refuse_unservable(elsewhere, params(dps_precision="full"), 10**9)


def test_server_learns_of_a_refusal_before_it_asks_for_the_first_output(config: Any) -> None:
    hook_front()
    front = AsyncLLM.__new__(AsyncLLM)
    front.vllm_config = config
    prompt: Any = {"type": "token", "prompt_token_ids": [7] * LIMIT_TOKENS}
    with pytest.raises(PrecisionRequestError, match="this prompt has 100"):
        front.generate(prompt, sampling_params=params(dps_precision="full"), request_id="a")
