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
"""From when the router has heard of it. What is sent later must find another replica."""


@dataclass
class Contender:
    """One way of routing, and what it did in all rounds."""

    fleet: Fleet
    hears: bool = True
    """Whether its router listens to the controller."""
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
    def p90_s(self) -> float:
        """Of the quietest round: what else the machine does stalls everybody, one after another."""
        return min(quantiles(times_s, n=10)[-1] for times_s in self.times_s)

    def round(self, seed: int) -> None:
        """Poisson arrivals, the same for everybody; one replica begins to restore amid them."""
        victim = list(self.fleet.pages)[seed % 2]
        rng = random.Random(seed)
        with (
            httpx.Client(timeout=60.0) as client,
            ThreadPoolExecutor(16) as pool,
            ThreadPoolExecutor(1) as teller,
        ):

            def ask() -> tuple[float, float, str]:
                sent_s = time.monotonic()
                answer = client.get(f"{self.fleet.url}/").raise_for_status()
                return sent_s, time.monotonic() - sent_s, str(answer.json())

            def tell() -> tuple[float, float]:
                """When the restore began, and since when the router knows."""
                began_s = time.monotonic()
                self.fleet.set(victim, RESTORING)
                if self.hears:
                    self.fleet.heard()
                return began_s, time.monotonic()

            begun_s = at_s = time.monotonic()
            told = None
            replies = []
            while told is None or not told.done() or at_s < told.result()[1] + RESTORE_S:
                time.sleep(max(0.0, at_s - time.monotonic()))
                if told is None and at_s >= begun_s + CALM_S:
                    told = teller.submit(tell)
                replies.append(pool.submit(ask))
                at_s += rng.expovariate(RATE_PER_S)
            restoring_s, heard_s = told.result()
            answered = [each.result() for each in replies]
        hit_s = [sent_s - restoring_s for sent_s, _, name in answered if name == victim]
        self.last_hit_s = max([self.last_hit_s, *hit_s])
        later = [reply for reply in answered if reply[0] > heard_s]
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
        baseline = Contender(stock, hears=False)
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
            f"{contender.last_hit_s * 1000:.0f} ms after its beginning; p90 "
            f"{contender.p90_s * 1000:.0f} ms in the quietest of {ROUNDS} rounds"
        )
        record_property(name, figures)
        print(f"{name}: share to the restoring replica {figures}")
    rival, ours = policies.values()
    # A fair rival: it does what Serve's own power of two does.
    assert 0.25 * baseline.share < rival.share < 4.0 * baseline.share
    assert ours.hits == 0
    assert ours.p90_s < min(baseline.p90_s, rival.p90_s)


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
