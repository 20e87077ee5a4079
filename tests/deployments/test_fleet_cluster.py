"""Router and controller on a real cluster: steering, live policies, and a dead controller."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

import httpx
import pytest

from dps_ray.cli.main import main
from dps_ray.engine.status_page import StatusPage
from dps_ray.fleet.scorers import Queue

from .browser import MISSING, browser
from .fleet import Fleet, kill_controller, until
from .statuses import IDLE, LENT, RESTORING

LEASE_TTL_S = 4.0
RESTORE_S = 0.5

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.usefixtures("calm")]


def test_equal_replicas_share_the_load(fleet: Fleet) -> None:
    """One that stands still for a moment gets less meanwhile: the rounds in the middle count."""
    rounds = [fleet.ask(30) for _ in range(5)]
    assert median(min(counts[replica_id] for replica_id in fleet.pages) for counts in rounds) >= 8


def test_no_request_reaches_a_replica_after_it_was_pushed_as_restoring(fleet: Fleet) -> None:
    victim, other = fleet.pages
    fleet.set(victim, RESTORING)
    fleet.heard()
    assert fleet.ask(100) == {other: 100}


def test_stream_is_answered_to_its_end(fleet: Fleet) -> None:
    answer = httpx.get(f"{fleet.url}/stream", params={"chunks": 5}, timeout=60.0)
    lines = answer.raise_for_status().text.splitlines()
    assert len(lines) == 5
    assert len(set(lines)) == 1
    assert lines[0] in fleet.pages


def test_replica_returns_to_routing_when_its_restore_ends(fleet: Fleet) -> None:
    victim, _ = fleet.pages
    fleet.set(victim, RESTORING)
    fleet.set(victim, IDLE)
    until(lambda: fleet.ask(8)[victim] > 0)


def test_all_replicas_restoring_still_serve(fleet: Fleet) -> None:
    for replica_id in fleet.pages:
        fleet.set(replica_id, RESTORING)
    assert sum(fleet.ask(20).values()) == 20


def test_weight_that_is_changed_live_decides_once_the_router_has_heard_and_restarts_no_replica(
    fleet: Fleet,
) -> None:
    cluster, weight = fleet.cluster, 0.5

    def decided(request_id: str) -> set[float]:
        """With which weights of the queue a request was decided about."""
        headers, query = {"X-Request-ID": request_id}, {"request": request_id}
        httpx.get(f"{cluster.url}/cheap/", headers=headers, timeout=60.0).raise_for_status()

        def explain() -> httpx.Response:
            return httpx.get(f"{cluster.url}/dps/explain", params=query, timeout=60.0)

        # A router that stands still tells too late.
        until(lambda: explain().is_success)
        candidates = explain().raise_for_status().json()["candidates"]
        terms = [term for each in candidates for term in each["reason"]["terms"]]
        return {term["weight"] for term in terms if term["scorer"] == "queue"}

    assert decided("before-the-change") == {Queue().weight}
    with ThreadPoolExecutor(1) as pool:
        routing = {"name": "mode_aware", "queue": {"weight": weight}}
        change = pool.submit(cluster.configure, {"routing": routing})
        until(lambda: cluster.status()["config"]["routing"]["queue"]["weight"] == weight)
        fleet.heard()
        weights = decided("after-the-change")
        change.result()
    assert weights == {weight}
    live = [e["replica_id"] for e in cluster.replicas("cheap") if e["standing"] == "live"]
    assert set(live) == set(fleet.pages)
    assert set(fleet.ask(20)) == set(fleet.pages)
    cluster.configure({})


def test_operator_is_told_why_a_request_went_where_it_did(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, other = fleet.pages
    fleet.set(victim, RESTORING)
    fleet.heard()
    url, headers = fleet.cluster.url, {"X-Request-ID": "asked-about"}
    httpx.get(f"{url}/cheap/", headers=headers, timeout=60.0).raise_for_status()

    def told(*words: str) -> str:
        def answered() -> bool:
            capsys.readouterr()
            return main(["explain", "--url", f"{url}/dps", *words]) == 0

        # A router that stands still tells too late.
        until(answered)
        return capsys.readouterr().out

    why = told("--request", "asked-about")
    print(why)
    assert f"taken by {other}" in why
    assert f"{victim}  restoring" in why
    assert "filter restoring puts it into tier restoring" in why
    why = told("--application", "cheap", "--floor", "full", "--replica", victim)
    print(why)
    assert "a new request to cheap: floor full" in why
    assert "gets nothing: left out by filter floor" in why


def test_dry_run_policy_shows_its_regret_and_moves_no_request(fleet: Fleet) -> None:
    victim, other = fleet.pages
    fleet.set(victim, RESTORING)
    dry_run = {"policy": {"name": "least_pressure"}, "share": 1.0}
    fleet.cluster.configure({"dry_run": dry_run})
    until(lambda: fleet.cluster.status()["config"]["dry_run"] is not None)
    fleet.heard()
    assert fleet.ask(40) == {other: 40}

    def figures() -> list[dict[str, Any]]:
        routers = fleet.cluster.status()["routers"]
        return [router["dry_run"] for router in routers if router["dry_run"]]

    until(lambda: any(each["compared"] >= 40 for each in figures()))
    assert any(each["worse_tier"] > 0 for each in figures())
    fleet.cluster.configure({})


def test_fleet_calls_the_controllers_own_port_and_the_handle_while_that_is_closed(
    fleet: Fleet,
) -> None:
    victim, other = fleet.pages
    cluster = fleet.cluster

    def in_a_second() -> tuple[int, int]:
        """Calls at the port and by the handle."""
        before = cluster.status()["direct"]
        time.sleep(1.2)
        after = cluster.status()["direct"]
        return after["calls"] - before["calls"], after["calls_by_handle"] - before[
            "calls_by_handle"
        ]

    def all_direct() -> bool:
        direct, by_handle = in_a_second()
        # Two replicas and their router at least.
        return direct >= 3 and by_handle == 0

    def all_by_handle() -> bool:
        direct, by_handle = in_a_second()
        return direct == 0 and by_handle >= 3

    until(all_direct)
    cluster.configure({"direct": {"enabled": False}})
    until(lambda: cluster.status()["direct"]["address"] is None)
    until(all_by_handle)
    fleet.set(victim, RESTORING)
    fleet.heard()
    assert fleet.ask(40) == {other: 40}
    cluster.configure({})
    until(all_direct)


def test_latest_decision_is_explained_in_the_status(fleet: Fleet) -> None:
    victim, other = fleet.pages
    fleet.set(victim, RESTORING)

    def explained() -> bool:
        fleet.ask(1)
        examples = [router["example"] for router in fleet.cluster.status()["routers"]]
        return any(
            {reason["replica_id"]: reason["demoted_by"] for reason in example["reasons"]}
            == {other: [], victim: [["restoring", 3]]}
            for example in examples
            if example and example["order"][0] == other
        )

    until(explained)


def test_page_and_status_are_served(fleet: Fleet) -> None:
    page = httpx.get(f"{fleet.cluster.url}/dps/", timeout=60.0).raise_for_status()
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<h1>DPS fleet</h1>" in page.text


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_live_page_of_the_running_fleet_follows_it_in_a_browser(fleet: Fleet) -> None:
    victim, other = fleet.pages
    fleet.cluster.configure({"dry_run": {"policy": {"name": "least_pressure"}, "share": 1.0}})
    with browser() as window:

        def shows(replica_id: str, text: str) -> None:
            row = f"[data-replica=\\'{replica_id}\\']"
            window.until(f"document.querySelector('{row}')?.innerText.includes('{text}')")

        window.open(f"{fleet.cluster.url}/dps/")
        for replica_id in fleet.pages:
            shows(replica_id, "live")
            shows(replica_id, "full")
        fleet.set(victim, RESTORING)
        shows(victim, "restoring")
        fleet.heard()

        def told(place: str, text: str) -> bool:
            fleet.ask(2)
            shown = window.run(f"document.querySelector('{place}').innerText.includes('{text}')")
            return bool(shown)

        until(lambda: told("#routers", "least_pressure: agrees"))
        until(lambda: told("#decision", f"{other[:12]} (chosen)"))
        assert window.text("#connection") == "live"
        assert window.run("document.querySelector('#error').hidden")
    fleet.cluster.configure({})


def test_wrong_live_configuration_is_shown_and_leaves_the_old_one(fleet: Fleet) -> None:
    fleet.cluster.configure({"routing": {"name": "mode_aware", "queue_wieght": 1}})
    until(lambda: fleet.cluster.status()["config_error"] is not None)
    status = fleet.cluster.status()
    assert "user_config.routing.mode_aware.queue_wieght is not an option" in status["config_error"]
    assert status["config"]["routing"]["name"] == "mode_aware"
    fleet.cluster.configure({})
    until(lambda: fleet.cluster.status()["config_error"] is None)


class PlayedEngine:
    """Plays a replica's engine that has lent memory and restores it once it is allowed to."""

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self.restored: tuple[float, float] | None = None
        self.asked_s = 0.0
        """When the report was sent by whose answer it may restore."""

    def run(self, stop: threading.Event) -> None:
        self._page.publish(LENT)
        while not self._page.permits().restore:
            if stop.wait(0.005):
                return
        self.asked_s = float(self._page._cells[3]) - LEASE_TTL_S
        started_s = time.monotonic()
        self._page.publish(replace(RESTORING, wants_restore=True))
        stop.wait(RESTORE_S)
        self._page.publish(IDLE)
        self.restored = (started_s, time.monotonic())


def test_restores_never_overlap_under_one_lease_and_wait_for_a_controller_that_died(
    fleet: Fleet,
) -> None:
    leases = {"max_concurrent": 1, "ttl_s": LEASE_TTL_S, "alone_after_s": None}
    fleet.cluster.configure({"leases": leases, "ageing": {"stale_after_s": 3.5}})
    until(lambda: fleet.cluster.status()["config"]["leases"]["max_concurrent"] == 1)
    time.sleep(LEASE_TTL_S)
    engines = {name: PlayedEngine(page) for name, page in fleet.pages.items()}
    stop = threading.Event()
    threads = [threading.Thread(target=e.run, args=(stop,)) for e in engines.values()]
    try:
        for thread in threads:
            thread.start()
        until(lambda: any(engine.restored for engine in engines.values()), timeout_s=120.0)
        before_s = time.monotonic()
        kill_controller()
        killed_s = time.monotonic()
        assert sum(fleet.ask(40).values()) == 40
        until(lambda: all(engine.restored for engine in engines.values()), timeout_s=120.0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    (_, first_ended_s), (second_began_s, _) = sorted(
        engine.restored for engine in engines.values() if engine.restored
    )
    assert second_began_s >= first_ended_s
    # The dead controller may have granted both, and an engine sees a grant a moment after. The new
    # one grants nothing before every lease of that one has run out.
    asked_s = max(engine.asked_s for engine in engines.values())
    assert asked_s < killed_s + LEASE_TTL_S / 4 or asked_s > before_s + LEASE_TTL_S
    until(fleet.is_back, timeout_s=120.0)
    fleet.cluster.configure({})


def test_service_and_steering_go_on_while_the_controller_is_dead(fleet: Fleet) -> None:
    victim, other = fleet.pages
    fleet.set(victim, RESTORING)
    fleet.heard()
    version = fleet.cluster.status()["version"]
    kill_controller()
    assert fleet.ask(100) == {other: 100}
    until(fleet.is_back, timeout_s=120.0)
    assert fleet.cluster.status()["version"] > version
    assert fleet.ask(40) == {other: 40}
