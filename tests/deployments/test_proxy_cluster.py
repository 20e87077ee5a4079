"""The HTTP proxy dies while requests run."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from dps_ray.chaos.faults import Fault, kill_one

from .cluster import processes
from .fleet import Fleet, until
from .statuses import RESTORING

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.usefixtures("calm")]

BROKEN = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
STREAMS = 4
ASKERS = 4
PATIENCE_S = 60.0
"""A request that says nothing for so long hangs."""
CHUNKS = 1000
"""Of a stream, which would take 80 s: long after the kill each still has most of it to come."""
BREAK_S = 20.0
"""By then every connection of a dead proxy has broken, also where the machine stood still."""


def test_dead_proxy_breaks_its_connections_and_another_serves_from_the_same_replicas(
    fleet: Fleet, record_property: Callable[[str, object], None]
) -> None:
    for replica_id in fleet.pages:
        # Answers take a tenth of a second each, so that some are open at the kill.
        fleet.set(replica_id, RESTORING)
    begun = [threading.Event() for _ in range(STREAMS)]
    stop = threading.Event()

    def read(begun: threading.Event) -> float:
        """When the stream broke."""

        def lines() -> None:
            url, query = f"{fleet.url}/stream", {"chunks": CHUNKS}
            with httpx.stream("GET", url, params=query, timeout=PATIENCE_S) as response:
                for _ in response.iter_lines():
                    begun.set()

        with pytest.raises(BROKEN):
            lines()
        return time.monotonic()

    def ask() -> Counter[str]:
        """How requests ended, one after the other; a hung one is a timeout, which is raised."""
        endings: Counter[str] = Counter()
        while not stop.is_set():
            try:
                answer = httpx.get(f"{fleet.url}/", timeout=PATIENCE_S)
                endings[f"HTTP {answer.status_code}"] += 1
            except BROKEN:
                endings["broken"] += 1
            except httpx.ConnectError:
                endings["refused"] += 1
                time.sleep(0.05)
        return endings

    def serves() -> bool:
        try:
            return httpx.get(f"{fleet.url}/", timeout=PATIENCE_S).is_success
        except httpx.TransportError:
            return False

    with ThreadPoolExecutor(STREAMS + ASKERS) as pool:
        try:
            streams = [pool.submit(read, each) for each in begun]
            askers = [pool.submit(ask) for _ in range(ASKERS)]
            until(lambda: all(each.is_set() for each in begun))
            kill = kill_one(Fault.PROXY, processes, random.Random(0))
            broken_s = [each.result() - kill.at_s for each in streams]
            until(serves, timeout_s=120.0)
            back_s = time.monotonic() - kill.at_s
            time.sleep(0.5)
        finally:
            stop.set()
        endings = sum((each.result() for each in askers), Counter[str]())
    figures = f"streams broken after {max(broken_s):.2f} s, back after {back_s:.1f} s, {endings}"
    record_property("proxy", figures)
    print(figures)
    assert max(broken_s) < BREAK_S
    assert endings["broken"] >= 1
    assert endings["HTTP 200"] >= 1
    assert set(fleet.ask(20)) == set(fleet.pages)
    until(fleet.is_back)
