"""The fleet's precision budget while a burst presses on every replica."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from dps_ray.chaos.watch import Watch

from ..cluster import Cluster, processes
from ..fleet import until
from .llm import complete, live_states, wait_for_mode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

REQUESTS = 24
"""All places of both replicas, whose base memory holds two each."""
FEWER = 12
"""In full mode a replica serves them one after the other."""
TOKENS = 20
FAST_TOKEN_SHARE = 0.05
"""Of one burst far more are fast, and the full ones of another do not make up for it."""
SHORT_WINDOW_S = 2.0
States = list[dict[str, Any]]


@dataclass(frozen=True)
class Burst:
    """What came of pressing on both replicas."""

    most_fast: int
    """Engines in fast mode at one moment, as their own pages tell, read every hundredth second."""
    fast_tokens: int
    """As the answers tell."""
    shown: list[States]
    """What the controller showed meanwhile, again and again."""

    @property
    def told_fast(self) -> int:
        """Replicas in fast mode at one moment, as the controller showed them."""
        return max(sum(state["mode"] == "fast" for state in states) for states in self.shown)


def test_burst_on_both_replicas_makes_one_fast_where_half_may_be_and_both_without_a_budget(
    api: httpx.Client, cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    unlimited = asyncio.run(burst(api, cluster))
    assert unlimited.most_fast == 2, "the burst does not press on both, and so proves nothing below"
    wait_for_mode(cluster, "full")
    cluster.configure({"budget": {"max_fast_replica_share": 0.5}})
    try:
        until(lambda: allowances(cluster) == 1)
        limited = asyncio.run(burst(api, cluster))
    finally:
        cluster.configure({})
    record_property("most_fast", limited.most_fast)
    record_property("statuses", len(limited.shown))
    assert limited.most_fast == limited.told_fast == 1
    assert any(denied_and_pressed(states) for states in limited.shown)
    until(lambda: all(state["may_go_fast"] for state in live_states(cluster)))


def test_burst_stays_in_full_mode_while_too_many_tokens_of_the_window_were_fast(
    api: httpx.Client, cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """The same burst goes fast under the same limit once those tokens have left the window."""
    if fast_token_share(cluster) <= FAST_TOKEN_SHARE:
        asyncio.run(burst(api, cluster))
    wait_for_mode(cluster, "full")
    budget = {"max_fast_token_share": FAST_TOKEN_SHARE}
    cluster.configure({"budget": budget})
    try:
        until(lambda: allowances(cluster) == 0)
        limited = asyncio.run(burst(api, cluster, FEWER))
        share = fast_token_share(cluster)
        cluster.configure({"budget": {**budget, "window_s": SHORT_WINDOW_S}})
        until(lambda: allowances(cluster) == 2)
        later = asyncio.run(burst(api, cluster, FEWER))
    finally:
        cluster.configure({})
    record_property("fast tokens", [limited.fast_tokens, later.fast_tokens])
    record_property("share in the window", share)
    assert share > FAST_TOKEN_SHARE
    assert limited.most_fast == limited.told_fast == limited.fast_tokens == 0
    assert any(state["waiting"] > 0 for states in limited.shown for state in states)
    assert later.most_fast >= 1
    assert later.fast_tokens > 0
    until(lambda: all(state["may_go_fast"] for state in live_states(cluster)))


async def burst(api: httpx.Client, cluster: Cluster, requests: int = REQUESTS) -> Burst:
    """Press on both replicas."""
    watch = Watch(cluster.url, processes)
    async with watch.running():
        fast_tokens, shown = await asyncio.to_thread(ask_all, api, cluster, requests)
    return Burst(watch.restores.most_fast, fast_tokens, shown)


def ask_all(api: httpx.Client, cluster: Cluster, requests: int) -> tuple[int, list[States]]:
    def ask(seed: int) -> dict[str, Any]:
        prompt = [3 + seed + token for token in range(90)]
        answer = complete(api, prompt=prompt, max_tokens=TOKENS, ignore_eos=True)
        return dict(answer["usage"])

    shown: list[States] = []
    with ThreadPoolExecutor(requests) as pool:
        asked = [pool.submit(ask, seed) for seed in range(requests)]
        while not all(each.done() for each in asked):
            shown.append(live_states(cluster))
            time.sleep(0.05)
    usages = [each.result() for each in asked]
    assert [usage["completion_tokens"] for usage in usages] == [TOKENS] * requests
    return sum(usage["dps"]["tokens_fast"] for usage in usages), shown


def allowances(cluster: Cluster) -> int:
    """Replicas that may go fast, as the controller keeps the books and as they say themselves."""
    kept = int(cluster.status()["budget"]["allowances"])
    said = sum(state["may_go_fast"] for state in live_states(cluster))
    return max(kept, said)


def fast_token_share(cluster: Cluster) -> float:
    """Share of fast tokens in the window, as the controller tells."""
    return float(cluster.status()["budget"]["fast_token_share"] or 0.0)


def denied_and_pressed(states: States) -> bool:
    """One replica is in fast mode, and the other stays in full mode with requests waiting."""
    by_mode = {state["mode"]: state for state in states}
    return by_mode.keys() == {"full", "fast"} and by_mode["full"]["waiting"] > 0
