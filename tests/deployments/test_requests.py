"""What a request says to the router, and what a refusal says to the client."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from dps_deployments.refusals import BadRequestError, PrecisionUnavailableError
from dps_deployments.requests import ask_of, floor_of, priority_of

from dps_ray.modes import Floor

from .standin_engine import info, request


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (request(), {}, Floor.ANY),
        (request(), {"X-DPS-Precision": "full"}, Floor.FULL),
        (request(vllm_xargs={"dps_precision": "prefer-full"}), None, Floor.PREFER_FULL),
        (request(vllm_xargs={"dps_precision": "any"}), {"x-dps-precision": "full"}, Floor.FULL),
    ],
)
def test_floor_is_read_from_the_header_then_the_body(
    body: Any, headers: dict[str, str] | None, expected: Floor
) -> None:
    assert floor_of(body, headers) is expected


def test_unknown_floor_is_refused_with_the_choices() -> None:
    with pytest.raises(BadRequestError, match="'half': give one of any, prefer-full, full"):
        floor_of(request(), {"X-DPS-Precision": "half"})


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_wait_that_is_no_number_of_seconds_is_refused(value: str) -> None:
    pending = SimpleNamespace(args=(request(), info(X_DPS_Wait_S=value)))
    with pytest.raises(BadRequestError, match="X-DPS-Wait-S"):
        ask_of(pending)


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (request(), {}, 0),
        (request(priority=3), {}, 3),
        (request(priority=3), {"x-vllm-priority": "-2"}, -2),
    ],
)
def test_priority_is_read_from_the_header_then_the_body(
    body: Any, headers: dict[str, str], expected: int
) -> None:
    assert priority_of(body, headers) == expected


@pytest.mark.parametrize("value", ["soon", "1.5", str(2**63)])
def test_priority_that_vllm_would_ignore_is_refused(value: str) -> None:
    with pytest.raises(BadRequestError, match="X-Vllm-Priority is"):
        priority_of(request(), {"X-Vllm-Priority": value})


def test_chat_prompts_with_the_same_beginning_share_their_prefix() -> None:
    def ask(question: str) -> tuple[int, ...]:
        messages = [{"role": "system", "content": "Be kind. " * 100}, {"content": question}]
        return ask_of(SimpleNamespace(args=(SimpleNamespace(messages=messages),))).prefix

    one, other = ask("first?" * 100), ask("second?" * 100)
    assert one[:3] == other[:3]
    assert one != other


def test_refusals_survive_the_way_between_processes() -> None:
    error = PrecisionUnavailableError("no", 503, 4.0)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.status_code, again.retry_after_s) == ("no", 503, 4.0)
