"""What a restoring replica still gets under three routers, and a dead one under ours."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import quantiles

import httpx
import pytest

from dps_ray.modes import Pin

from .cheap import cheap_app
from .cluster import Cluster
from .fleet import Fleet, deployed, until
from .statuses import IDLE, RESTORING

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.usefixtures("calm")]

ROUNDS = 3
RATE_PER_S = 15.0
CALM_S = 0.5
RESTORE_S = 2.5
AFTER_S = 0.1
"""Requests sent later than this after the restore began must find another replica."""


@dataclass
class Contender:
    """One way of routing, and what it did in all rounds."""

    fleet: Fleet
    hits: int = 0
    sent: int = 0
    times_s: list[list[float]] = field(default_factory=list)
    """Of the later requests, by round."""
    last_hit_s: float = 0.0
    """From the restore's beginning to the last request that the restoring replica still got."""

    @property
    def share(self) -> float:
        """Share of the later requests that the restoring replica got."""
        return self.hits / self.sent

    @property
    def p95_s(self) -> float:
        """Of the quietest round: what else the machine does stalls everybody, one after another."""
        return min(quantiles(times_s, n=20)[-1] for times_s in self.times_s)

    def round(self, seed: int) -> None:
        """Poisson arrivals, the same for everybody; one replica begins to restore amid them."""
        victim = list(self.fleet.pages)[seed % 2]
        rng = random.Random(seed)
        arrivals_s = [0.0]
        while arrivals_s[-1] < CALM_S + RESTORE_S:
            arrivals_s.append(arrivals_s[-1] + rng.expovariate(RATE_PER_S))
        with httpx.Client(timeout=30.0) as client, ThreadPoolExecutor(16) as pool:

            def ask() -> tuple[float, float, str]:
                sent_s = time.monotonic()
                answer = client.get(f"{self.fleet.url}/").raise_for_status()
                return sent_s, time.monotonic() - sent_s, str(answer.json())

            began_s = time.monotonic()
            restoring_s = None
            replies = []
            for at_s in arrivals_s:
                time.sleep(max(0.0, began_s + at_s - time.monotonic()))
                if restoring_s is None and at_s >= CALM_S:
                    self.fleet.pages[victim].publish(RESTORING)
                    restoring_s = time.monotonic()
                replies.append(pool.submit(ask))
            assert restoring_s is not None
            answered = [each.result() for each in replies]
        hit_s = [sent_s - restoring_s for sent_s, _, name in answered if name == victim]
        self.last_hit_s = max([self.last_hit_s, *hit_s])
        later = [reply for reply in answered if reply[0] > restoring_s + AFTER_S]
        self.sent += len(later)
        self.hits += sum(name == victim for _, _, name in later)
        self.times_s.append([taken_s for _, taken_s, _ in later])
        self.fleet.set(victim, IDLE)


def test_mode_aware_routing_spares_a_restoring_replica_that_power_of_two_goes_on_using(
    fleet: Fleet, record_property: Callable[[str, object], None]
) -> None:
    """Serve's own router serves as many requests beside either policy of ours."""
    cluster = fleet.cluster
    policies = {name: Contender(fleet) for name in ("power_of_two", "mode_aware")}
    with deployed(cluster, cheap_app(router=None), "stock") as stock:
        baseline = Contender(stock)
        for replica_id in stock.pages:
            stock.set(replica_id, IDLE)
        stock.ask(1)
        for number in range(ROUNDS):
            for policy, contender in policies.items():
                cluster.configure({"routing": {"name": policy}})
                until(lambda to=policy: _policies(cluster) == {to})
                with ThreadPoolExecutor(1) as pool:
                    beside = pool.submit(baseline.round, number)
                    contender.round(number)
                    beside.result()
    cluster.configure({})
    contenders = {"Serve's own": baseline, **policies}
    for name, contender in contenders.items():
        figures = (
            f"{contender.share:.3f} of {contender.sent}, the last "
            f"{contender.last_hit_s * 1000:.0f} ms after its beginning; p95 "
            f"{contender.p95_s * 1000:.0f} ms in the quietest of {ROUNDS} rounds"
        )
        record_property(name, figures)
        print(f"{name}: share to the restoring replica {figures}")
    rival, ours = policies.values()
    # A fair rival: it does what Serve's own power of two does.
    assert 0.25 * baseline.share < rival.share < 4.0 * baseline.share
    assert ours.hits == 0
    assert ours.p95_s < min(baseline.p95_s, rival.p95_s)


def test_dead_engine_gets_nothing_more_and_stays_dead(cluster: Cluster) -> None:
    with deployed(cluster, cheap_app(), "dying") as fleet:
        victim, other = fleet.pages
        for replica_id in fleet.pages:
            fleet.set(replica_id, IDLE)
        fleet.ask(1)
        fleet.pages[victim].set_pin(Pin.FAST)
        until(lambda: fleet.entry(victim)["standing"] == "dead")
        fleet.heard()
        assert fleet.ask(40) == {other: 40}
        fleet.pages[victim].set_pin(Pin.AUTO)
        time.sleep(0.5)
        assert fleet.entry(victim)["standing"] == "dead"


def _policies(cluster: Cluster) -> set[str]:
    """What the routers that reported lately decide by."""
    return {router["policy"] for router in cluster.status()["routers"] if router["age_s"] < 1.5}
