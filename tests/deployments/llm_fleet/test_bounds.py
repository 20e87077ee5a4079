"""What a real fleet refuses at its edge, and whom it sheds when it is full."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ..cluster import Cluster
from ..fleet import until
from .llm import MAX_BODY_BYTES, MODEL, complete

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


def test_prompts_headers_and_bodies_are_bounded_at_the_edge(api: httpx.Client) -> None:
    def told(status: int, **request: Any) -> str:
        answer = api.post("/v1/completions", **request)
        assert answer.status_code == status, answer.text
        return str(answer.json()["error"]["message"])

    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    assert "prompt has 5000 characters: at most 4096" in told(
        400, json={**body, "prompt": "x" * 5000}
    )
    assert "prompt has 300 tokens: at most 256" in told(400, json={**body, "prompt": [5] * 300})
    assert "prompt holds 65 prompts: at most 64" in told(400, json={**body, "prompt": ["x"] * 65})
    assert "n asks for 129 answers" in told(400, json={**body, "n": 129})
    long = {"X-DPS-Session": "s" * 300}
    assert "x-dps-session has 300 characters" in told(431, json=body, headers=long)
    assert "header X-Vllm-Priority is 'soon'" in told(
        400, json=body, headers={"X-Vllm-Priority": "soon"}
    )
    many = b" " * MAX_BODY_BYTES
    assert "at most 65536" in told(413, content=many + b"{}")
    pieces = iter([many, many, b"{}"])
    assert "more than 65536 bytes" in told(413, content=pieces)
    assert complete(api)["usage"]["completion_tokens"] >= 1


def test_urgent_requests_are_served_while_others_are_shed(
    api: httpx.Client, cluster: Cluster
) -> None:
    """24 places and a queue of 4 under more requests than that: urgent ones always find room."""
    cluster.configure({"admission": {"max_waiting": 4, "max_retry_after_s": 30}})

    def send(priority: int) -> httpx.Response:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "ignore_eos": True}
        return api.post("/v1/completions", json={**body, "priority": priority})

    low: list[Future[httpx.Response]] = []

    def shed() -> list[httpx.Response]:
        answers = [reply.result() for reply in low if reply.done()]
        return [answer for answer in answers if answer.status_code == 503]

    with ThreadPoolExecutor(60) as pool:

        def overloaded() -> bool:
            while sum(not reply.done() for reply in low) < 50:
                low.append(pool.submit(send, 1))
            return len(shed()) >= 4

        until(overloaded, 120.0)
        high = [pool.submit(send, -1) for _ in range(4)]
        assert [reply.result().status_code for reply in high] == [200] * 4
    cluster.configure({})
    # At least one replica's places and the queue: the other one's may not be known all the time.
    assert len(low) - len(shed()) >= 16
    assert {reply.result().status_code for reply in low} == {200, 503}
    assert all(2 <= int(answer.headers["Retry-After"]) <= 30 for answer in shed())
