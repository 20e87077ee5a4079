"""What a restoring replica still gets under three routers."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import httpx
import pytest
from ray import serve

from dps_ray.engine.status_page import StatusPage
from dps_ray.status import EngineStatus

from .cheap import ROUTER, cheap_app, page_key
from .cluster import Cluster
from .statuses import IDLE, RESTORING

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ROUNDS = 3
RATE_PER_S = 10.0
CALM_S = 0.5
RESTORE_S = 4.0
AFTER_S = 0.1
"""Requests sent later than this after the restore began must find another replica."""


def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "the condition never held"
        time.sleep(0.02)


@dataclass(frozen=True)
class App:
    """Two cheap replicas, and the pages that play their engines."""

    cluster: Cluster
    name: str
    pages: dict[str, StatusPage]

    def ask(self, client: httpx.Client) -> str:
        """Who answers a request."""
        return str(client.get(f"{self.cluster.url}/{self.name}/").raise_for_status().json())

    def set(self, replica_id: str, status: EngineStatus) -> None:
        """Publish an engine status and wait until the controller shows it."""
        self.pages[replica_id].publish(status)
        until(
            lambda: any(
                entry["replica_id"] == replica_id and entry["state"]["mode"] == status.mode
                for entry in self.cluster.replicas(self.name)
            )
        )


@contextmanager
def deployed(cluster: Cluster, name: str, router: dict[str, Any] | None) -> Iterator[App]:
    """The application, for the block."""
    cluster.run(cheap_app(router=router), name, f"/{name}")
    until(lambda: len(cluster.replicas(name)) == 2)
    ids = [entry["replica_id"] for entry in cluster.replicas(name)]
    app = App(cluster, name, {each: StatusPage.attach(page_key(each)) for each in ids})
    try:
        with httpx.Client() as client:
            app.ask(client)
        for replica_id in ids:
            app.set(replica_id, IDLE)
        yield app
    finally:
        serve.delete(name)
        for page in app.pages.values():
            page.remove()


@dataclass
class Contender:
    """One way of routing, and what it did in all rounds."""

    app: App
    policy: str | None
    """Policy of the fleet's router; ``None`` for Serve's own."""
    hits: int = 0
    sent: int = 0
    times_s: list[float] = field(default_factory=list)
    last_hit_s: float = 0.0
    """From the restore's beginning to the last request that the restoring replica still got."""

    @property
    def share(self) -> float:
        """Share of the later requests that the restoring replica got."""
        return self.hits / self.sent

    @property
    def p95_s(self) -> float:
        return quantiles(self.times_s, n=20)[-1]

    def round(self, seed: int) -> None:
        """Poisson arrivals, the same for everybody; one replica begins to restore amid them."""
        victim = list(self.app.pages)[seed % 2]
        rng = random.Random(seed)
        arrivals_s = [0.0]
        while arrivals_s[-1] < CALM_S + RESTORE_S:
            arrivals_s.append(arrivals_s[-1] + rng.expovariate(RATE_PER_S))
        with httpx.Client(timeout=30.0) as client, ThreadPoolExecutor(16) as pool:

            def ask() -> tuple[float, float, str]:
                sent_s = time.monotonic()
                name = self.app.ask(client)
                return sent_s, time.monotonic() - sent_s, name

            began_s = time.monotonic()
            restoring_s = None
            replies = []
            for at_s in arrivals_s:
                time.sleep(max(0.0, began_s + at_s - time.monotonic()))
                if restoring_s is None and at_s >= CALM_S:
                    self.app.pages[victim].publish(RESTORING)
                    restoring_s = time.monotonic()
                replies.append(pool.submit(ask))
            assert restoring_s is not None
            answered = [each.result() for each in replies]
        hit_s = [sent_s - restoring_s for sent_s, _, name in answered if name == victim]
        self.last_hit_s = max([self.last_hit_s, *hit_s])
        later = [reply for reply in answered if reply[0] > restoring_s + AFTER_S]
        self.sent += len(later)
        self.hits += sum(name == victim for _, _, name in later)
        self.times_s += [taken_s for _, taken_s, _ in later]
        self.app.set(victim, IDLE)


def test_mode_aware_routing_spares_a_restoring_replica_that_power_of_two_goes_on_using(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    with (
        deployed(cluster, "steered", ROUTER) as steered,
        deployed(cluster, "stock", None) as stock,
    ):
        contenders = {
            "Serve's own": Contender(stock, None),
            "power_of_two": Contender(steered, "power_of_two"),
            "mode_aware": Contender(steered, "mode_aware"),
        }
        until(lambda: cluster.status()["listening_routers"] >= 1)
        for number in range(ROUNDS):
            for contender in contenders.values():
                if contender.policy is not None:
                    cluster.configure({"routing": {"name": contender.policy}})
                    until(lambda to=contender.policy: _policies(cluster) == {to})
                contender.round(number)
        cluster.configure({})
    for name, contender in contenders.items():
        figures = f"{contender.share:.3f} of {contender.sent}, p95 {contender.p95_s * 1000:.0f} ms"
        figures += f", the last {contender.last_hit_s * 1000:.0f} ms after its beginning"
        record_property(name, figures)
        print(f"{name}: share to the restoring replica {figures}")
    baseline, rival, ours = contenders.values()
    # A fair rival: it does what Serve's own power of two does.
    assert 0.25 * baseline.share < rival.share < 4.0 * baseline.share
    assert ours.hits == 0
    assert ours.p95_s < min(baseline.p95_s, rival.p95_s)


def _policies(cluster: Cluster) -> set[str]:
    """What the routers that reported lately decide by."""
    return {router["policy"] for router in cluster.status()["routers"] if router["age_s"] < 1.5}
