"""The fleet's precision budget while a burst presses on every replica."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dps_ray.chaos.watch import Watch

from ..cluster import Cluster
from ..fleet import until
from .llm import complete, live_states, processes, wait_for_mode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

BURST = 24
"""Requests: all places of both replicas, whose base memory holds two each."""
States = list[dict[str, Any]]


def test_burst_on_both_replicas_makes_one_fast_where_half_may_be_and_both_without_a_budget(
    api: httpx.Client, cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    most_fast, shown = asyncio.run(burst(api, cluster))
    assert most_fast == 2, "the burst does not press on both, and so proves nothing below"
    wait_for_mode(cluster, "full")
    cluster.configure({"budget": {"max_fast_replica_share": 0.5}})
    try:
        until(lambda: allowances(cluster) == 1)
        most_fast, shown = asyncio.run(burst(api, cluster))
    finally:
        cluster.configure({})
    told_fast = [sum(state["mode"] == "fast" for state in states) for states in shown]
    record_property("most_fast", most_fast)
    record_property("statuses", len(shown))
    assert most_fast == max(told_fast) == 1
    assert any(denied_and_pressed(states) for states in shown)
    until(lambda: all(state["may_go_fast"] for state in live_states(cluster)))


async def burst(api: httpx.Client, cluster: Cluster) -> tuple[int, list[States]]:
    """Press on both replicas.

    Returns
    -------
    most_fast
        Engines in fast mode at one moment, as their own pages tell, read every hundredth second.
    shown
        What the controller showed meanwhile, again and again.
    """
    watch = Watch(cluster.url, processes)
    async with watch.running():
        shown = await asyncio.to_thread(ask_all, api, cluster)
    return watch.restores.most_fast, shown


def ask_all(api: httpx.Client, cluster: Cluster) -> list[States]:
    def ask(seed: int) -> int:
        prompt = [3 + seed + token for token in range(90)]
        answer = complete(api, prompt=prompt, max_tokens=30, ignore_eos=True)
        return int(answer["usage"]["completion_tokens"])

    shown: list[States] = []
    with ThreadPoolExecutor(BURST) as pool:
        asked = [pool.submit(ask, seed) for seed in range(BURST)]
        while not all(each.done() for each in asked):
            shown.append(live_states(cluster))
            time.sleep(0.05)
    assert [each.result() for each in asked] == [30] * BURST
    return shown


def allowances(cluster: Cluster) -> int:
    """Replicas that may go fast, as the controller keeps the books and as they say themselves."""
    kept = int(cluster.status()["budget"]["allowances"])
    said = sum(state["may_go_fast"] for state in live_states(cluster))
    return max(kept, said)


def denied_and_pressed(states: States) -> bool:
    """One replica is in fast mode, and the other stays in full mode with requests waiting."""
    by_mode = {state["mode"]: state for state in states}
    return by_mode.keys() == {"full", "fast"} and by_mode["full"]["waiting"] > 0
