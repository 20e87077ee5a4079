"""The cheap fleet as tests see it: its pages, its router and its controller."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import ray
from ray import serve

from dps_ray.engine.status_page import StatusPage
from dps_ray.status import EngineStatus

from .cheap import CONTROLLER_APP, page_key
from .cluster import Cluster


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Wait for a condition and return how long it took, seconds."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < timeout_s, "the condition never held"
        time.sleep(0.02)
    return time.monotonic() - started_s


def wait_for_routers(cluster: Cluster, application: str) -> None:
    """Wait until an application's router decides by all that the controller knows now."""
    version = cluster.status()["version"]

    def knows(router: dict[str, Any]) -> bool:
        # Those of a fleet before have older versions; a cheap application has a single router.
        return router["application"] == application and (router["version"] or 0) >= version

    until(lambda: any(knows(router) for router in cluster.status()["routers"]))


@dataclass(frozen=True)
class Fleet:
    """Two cheap replicas behind the router, and the pages that play their engines."""

    cluster: Cluster
    pages: dict[str, StatusPage]
    name: str = "cheap"
    """Of the application."""

    @property
    def url(self) -> str:
        return f"{self.cluster.url}/{self.name}"

    def entry(self, replica_id: str) -> dict[str, Any]:
        entries = {entry["replica_id"]: entry for entry in self.cluster.replicas(self.name)}
        return dict(entries.get(replica_id, {"standing": None, "state": None}))

    def set(self, replica_id: str, status: EngineStatus) -> None:
        """Publish an engine status and wait until the controller shows it."""
        self.pages[replica_id].publish(status)
        until(lambda: self._shows(replica_id, status))

    def heard(self) -> None:
        """Wait until the router decides by all that the controller knows now."""
        wait_for_routers(self.cluster, self.name)

    def ask(self, count: int) -> Counter[str]:
        """Send requests, eight at a time, and count who answered."""
        with httpx.Client(timeout=60.0) as client, ThreadPoolExecutor(8) as pool:
            replies = pool.map(
                lambda _: client.get(f"{self.url}/").raise_for_status().json(),
                range(count),
            )
            return Counter(replies)

    def is_back(self) -> bool:
        """The controller answers again, has heard every replica, and some router listens."""
        try:
            status = self.cluster.status(timeout_s=5.0)
        except httpx.HTTPError:
            return False
        live = live_replicas(self.cluster, self.name)
        return len(live) == len(self.pages) and status["listening_routers"] >= 1

    def _shows(self, replica_id: str, status: EngineStatus) -> bool:
        entry = self.entry(replica_id)
        return entry["standing"] == "live" and entry["state"]["restoring"] == status.restoring


def live_replicas(cluster: Cluster, application: str) -> list[str]:
    """Not those of an application before, which are forgotten slowly."""
    entries = cluster.replicas(application)
    return [entry["replica_id"] for entry in entries if entry["standing"] == "live"]


@contextmanager
def deployed(
    cluster: Cluster, application: serve.Application, name: str = "cheap"
) -> Iterator[Fleet]:
    """Two cheap replicas, for the block."""
    cluster.run(application, name, f"/{name}")
    until(lambda: len(live_replicas(cluster, name)) == 2)
    ids = live_replicas(cluster, name)
    pages = {replica_id: StatusPage.attach(page_key(replica_id)) for replica_id in ids}
    try:
        yield Fleet(cluster, pages, name)
    finally:
        serve.delete(name)
        for page in pages.values():
            page.remove()


def kill_controller() -> None:
    prefix = f"SERVE_REPLICA::{CONTROLLER_APP}#"
    (name,) = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(prefix)
    ]
    ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)
