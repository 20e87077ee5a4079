"""The fleet's precision budget while a burst presses on every replica."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
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
LONGEST_BURST_S = 60.0
States = list[dict[str, Any]]
Enough = Callable[[Watch, States], bool]
"""Whether the engines' own pages, or what the controller shows now, tell what a burst is for. How
long that takes depends on the machine: waiting requests are told with the next heartbeat."""


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


@pytest.fixture
def unlimited(api: httpx.Client, cluster: Cluster) -> Iterator[Cluster]:
    """The fleet without a budget, before the test and after it, and both replicas know."""
    until(lambda: may_go_fast(cluster) == [True, True])
    yield cluster
    cluster.configure({})
    until(lambda: all(may_go_fast(cluster)))


def test_burst_on_both_replicas_makes_one_fast_where_half_may_be_and_both_without_a_budget(
    api: httpx.Client, unlimited: Cluster, record_property: Callable[[str, object], None]
) -> None:
    cluster = unlimited
    free = asyncio.run(burst(api, cluster, lambda watch, _: watch.restores.most_fast == 2))
    assert free.most_fast == 2, "the burst does not press on both, and so proves nothing below"
    wait_for_mode(cluster, "full")
    cluster.configure({"budget": {"max_fast_replica_share": 0.5}})
    until(lambda: allowances(cluster) == 1)
    limited = asyncio.run(burst(api, cluster, lambda _, states: denied_and_pressed(states)))
    record_property("most_fast", limited.most_fast)
    record_property("statuses", len(limited.shown))
    assert limited.most_fast == limited.told_fast == 1
    assert any(denied_and_pressed(states) for states in limited.shown)


def test_burst_stays_in_full_mode_while_too_many_tokens_of_the_window_were_fast(
    api: httpx.Client, unlimited: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """The same burst goes fast under the same limit once those tokens have left the window."""
    cluster = unlimited
    if fast_token_share(cluster) <= FAST_TOKEN_SHARE:
        asyncio.run(burst(api, cluster, any_fast))
    wait_for_mode(cluster, "full")
    budget = {"max_fast_token_share": FAST_TOKEN_SHARE}
    cluster.configure({"budget": budget})
    until(lambda: allowances(cluster) == 0)
    limited = asyncio.run(burst(api, cluster, lambda _, states: any_waits(states), FEWER))
    share = fast_token_share(cluster)
    cluster.configure({"budget": {**budget, "window_s": SHORT_WINDOW_S}})
    until(lambda: allowances(cluster) == 2)
    later = asyncio.run(burst(api, cluster, any_fast, FEWER))
    record_property("fast tokens", [limited.fast_tokens, later.fast_tokens])
    record_property("share in the window", share)
    assert share > FAST_TOKEN_SHARE
    assert limited.most_fast == limited.told_fast == limited.fast_tokens == 0
    assert any(any_waits(states) for states in limited.shown)
    assert later.most_fast >= 1
    assert later.fast_tokens > 0


async def burst(
    api: httpx.Client, cluster: Cluster, enough: Enough, requests: int = REQUESTS
) -> Burst:
    """Press on both replicas with so many requests at once, and until it is enough."""
    watch = Watch(cluster.url, processes)
    async with watch.running():
        fast_tokens, shown = await asyncio.to_thread(
            ask_all, api, cluster, lambda states: enough(watch, states), requests
        )
    return Burst(watch.restores.most_fast, fast_tokens, shown)


def ask_all(
    api: httpx.Client, cluster: Cluster, enough: Callable[[States], bool], requests: int
) -> tuple[int, list[States]]:
    """Ask with as many clients, each of which asks again while it is not enough."""
    ends = threading.Event()

    def ask_on(seed: int) -> int:
        prompt = [3 + seed + token for token in range(90)]
        fast_tokens = 0
        while True:
            answer = complete(api, prompt=prompt, max_tokens=TOKENS, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == TOKENS
            fast_tokens += answer["usage"]["dps"]["tokens_fast"]
            if ends.is_set():
                return fast_tokens

    shown: list[States] = []
    latest_end_s = time.monotonic() + LONGEST_BURST_S
    with ThreadPoolExecutor(requests) as pool:
        asked = [pool.submit(ask_on, seed) for seed in range(requests)]
        try:
            while not all(each.done() for each in asked):
                shown.append(live_states(cluster))
                if enough(shown[-1]) or time.monotonic() > latest_end_s:
                    ends.set()
                time.sleep(0.05)
        finally:
            ends.set()
    return sum(each.result() for each in asked), shown


def may_go_fast(cluster: Cluster) -> list[bool | None]:
    """What each live replica says of itself."""
    return [state["may_go_fast"] for state in live_states(cluster)]


def allowances(cluster: Cluster) -> int:
    """Replicas that may go fast, as the controller keeps the books and as they say themselves."""
    kept = int(cluster.status()["budget"]["allowances"])
    said = sum(allowed is True for allowed in may_go_fast(cluster))
    return max(kept, said)


def fast_token_share(cluster: Cluster) -> float:
    """Share of fast tokens in the window, as the controller tells."""
    return float(cluster.status()["budget"]["fast_token_share"] or 0.0)


def denied_and_pressed(states: States) -> bool:
    """One replica is in fast mode, and the other stays in full mode with requests waiting."""
    by_mode = {state["mode"]: state for state in states}
    return by_mode.keys() == {"full", "fast"} and by_mode["full"]["waiting"] > 0


def any_fast(watch: Watch, _: States) -> bool:
    return watch.restores.most_fast > 0


def any_waits(states: States) -> bool:
    return any(state["waiting"] > 0 for state in states)
