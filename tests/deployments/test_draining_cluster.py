"""A replica that Serve stops tells the fleet itself, ends what it has and gets nothing new."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray import serve

from dps_ray.fleet.state import Health
from dps_ray.modes import Pin

from .cheap import LET_GO, cheap_app
from .cluster import Cluster
from .fleet import deployed, until, wait_for_routers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

DRAIN_S = 5.0


def test_replica_that_is_stopped_says_so_before_it_is_gone(cluster: Cluster) -> None:
    """Nothing was ever sent to it, so no router knows it and its draining cannot be inferred."""
    app = cheap_app(num_replicas=1, graceful_shutdown_wait_loop_s=DRAIN_S)
    cluster.run(app, "leaving", "/leaving")

    def health() -> set[str]:
        return {entry["state"]["health"] for entry in cluster.replicas("leaving")}

    until(lambda: health() == {Health.READY})
    assert not [r for r in cluster.status()["routers"] if r["application"] == "leaving"]
    serve.delete("leaving", _blocking=False)
    taken_s = until(lambda: health() == {Health.DRAINING})
    print(f"a replica that is stopped says so after {taken_s:.2f} s")
    until(lambda: "leaving" not in serve.status().applications, timeout_s=120.0)


def test_replica_that_is_taken_away_ends_its_streams_and_gets_nothing_new(
    cluster: Cluster,
) -> None:
    lines: list[list[str]] = [[] for _ in range(12)]

    def app(replicas: int) -> serve.Application:
        # Serve waits so long for the streams, which end when the test has seen enough.
        return cheap_app(version="kept", num_replicas=replicas, graceful_shutdown_timeout_s=200.0)

    def read(lines: list[str]) -> None:
        url, query = f"{cluster.url}/shrinking/stream", {"chunks": 1_000_000}
        with httpx.stream("GET", url, params=query, timeout=60.0) as response:
            for line in response.raise_for_status().iter_lines():
                lines.append(line)

    def draining() -> list[str]:
        entries = cluster.replicas("shrinking")
        return [entry["replica_id"] for entry in entries if entry["standing"] == "draining"]

    with (
        deployed(cluster, app(2), "shrinking") as fleet,
        ThreadPoolExecutor(len(lines) + 1) as pool,
        httpx.Client(timeout=60.0) as client,
    ):
        streams = [pool.submit(read, each) for each in lines]
        try:
            until(lambda: all(lines))
            assert len({each[0] for each in lines}) == 2
            update = pool.submit(cluster.run, app(1), "shrinking", "/shrinking")
            until(lambda: bool(draining()))
            (leaver,) = draining()
            wait_for_routers(cluster, "shrinking")
            answered = [client.get(f"{cluster.url}/shrinking/").json() for _ in range(20)]
            assert not any(stream.done() for stream in streams)
        finally:
            for page in fleet.pages.values():
                page.set_pin(Pin.FULL)
        for stream in [*streams, update]:
            stream.result()
    assert leaver not in answered
    assert [each[-1] for each in lines] == [LET_GO] * len(lines)
    assert [set(each[:-1]) for each in lines] == [{each[0]} for each in lines]
