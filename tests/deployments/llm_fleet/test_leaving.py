"""Clients that leave before their answer is complete."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ..cluster import Cluster
from ..fleet import until
from .llm import MODEL, complete, total, wait_for_mode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

LONG = 160
"""Tokens of an answer that nobody waits for."""


def test_client_that_leaves_frees_its_blocks_before_its_answer_is_complete(
    api: httpx.Client, cluster: Cluster
) -> None:
    before = made(cluster)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    for _ in range(8):
        with api.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    time.sleep(1.2)

    def free() -> bool:
        return (
            made(cluster) >= before + 8
            and not total(cluster, "running")
            and not total(cluster, "used_blocks")
        )

    until(free, 60.0)
    assert made(cluster) - before < 0.9 * 8 * 200


def test_clients_that_hang_up_before_a_whole_answer_leave_nothing_running_and_nothing_queued(
    api: httpx.Client, cluster: Cluster
) -> None:
    """24 run or wait in the engines, 16 in the queue of the ingress."""
    before = made(cluster)
    with ThreadPoolExecutor(40) as pool:
        for each in [pool.submit(leave, api, 1.5) for _ in range(40)]:
            each.result()
    until(lambda: idle(cluster), 30.0)
    time.sleep(1.2)
    assert made(cluster) - before < 40 * LONG / 2
    complete(api)


def test_client_that_hangs_up_while_it_waits_for_full_mode_is_not_served_later(
    api: httpx.Client, cluster: Cluster
) -> None:
    cluster.configure({"pins": {"*": "fast"}})
    wait_for_mode(cluster, "fast")
    before = total(cluster, "tokens_full")
    leave(api, 0.5, X_DPS_Precision="full", X_DPS_Wait_S="30")
    assert total(cluster, "full_requests") == 0
    cluster.configure({})
    wait_for_mode(cluster, "full")
    time.sleep(1.5)
    assert total(cluster, "tokens_full") == before
    assert total(cluster, "used_blocks") == 0


def leave(api: httpx.Client, seconds: float, **headers: str) -> None:
    """Ask for a long answer that does not stream, and hang up before it is there."""
    body = {"model": MODEL, "prompt": [7] * 60, "max_tokens": LONG, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{str(api.base_url).rstrip('/')}/v1/completions",
            json=body,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
            timeout=httpx.Timeout(60.0, read=seconds),
        )


def idle(cluster: Cluster) -> bool:
    return not any(total(cluster, name) for name in ("running", "waiting", "used_blocks"))


def made(cluster: Cluster) -> int:
    """Tokens made so far."""
    return total(cluster, "tokens_full") + total(cluster, "tokens_fast")
