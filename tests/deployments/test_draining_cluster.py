"""A replica that Serve stops tells the fleet itself, ends what it has and gets nothing new."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray import serve

from dps_ray.fleet.state import Health

from .cheap import STREAM_CHUNKS, cheap_app
from .cluster import Cluster
from .fleet import until, wait_for_routers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

DRAIN_S = 2.0


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
    until(lambda: "leaving" not in serve.status().applications, timeout_s=60.0)


def test_replica_that_is_taken_away_ends_its_streams_and_gets_nothing_new(
    cluster: Cluster,
) -> None:
    cluster.run(cheap_app(version="kept", num_replicas=2), "shrinking", "/shrinking")
    lines: list[list[str]] = [[] for _ in range(12)]

    def read(lines: list[str]) -> None:
        with httpx.stream("GET", f"{cluster.url}/shrinking/stream", timeout=30.0) as response:
            lines.extend(response.raise_for_status().iter_lines())

    def draining() -> list[str]:
        entries = cluster.replicas("shrinking")
        return [entry["replica_id"] for entry in entries if entry["standing"] == "draining"]

    with ThreadPoolExecutor(len(lines) + 1) as pool, httpx.Client(timeout=30.0) as client:
        streams = [pool.submit(read, each) for each in lines]
        until(lambda: all(lines))
        assert len({each[0] for each in lines}) == 2
        smaller = cheap_app(version="kept", num_replicas=1)
        update = pool.submit(cluster.run, smaller, "shrinking", "/shrinking")
        until(lambda: bool(draining()))
        (leaver,) = draining()
        wait_for_routers(cluster, "shrinking")
        answered = [client.get(f"{cluster.url}/shrinking/").json() for _ in range(20)]
        ended = [each for each in lines if each[0] == leaver and len(each) == STREAM_CHUNKS]
        assert not ended, "its streams had ended before the last request was sent"
        for stream in streams:
            stream.result()
        update.result()
    assert leaver not in answered
    assert [set(each) for each in lines] == [{each[0]} for each in lines]
    assert [len(each) for each in lines] == [STREAM_CHUNKS] * len(lines)
    serve.delete("shrinking")
