"""The controller's live page in a real browser, fed by the controller's real status."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dps_deployments.controller import PAGE, PAGE_POLICY, FleetController

from dps_ray.fleet.ask import Ask
from dps_ray.fleet.publication import Publication
from dps_ray.fleet.routing import Peer
from dps_ray.fleet.state import Health, ReplicaState, Source
from dps_ray.fleet.view import FleetView
from dps_ray.modes import Mode

from .browser import MISSING, Browser, browser

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.timeout(120),
]


PATIENT = {
    "ageing": {"stale_after_s": 900.0, "forget_after_s": 1000.0},
    "leases": {"ttl_s": 901.0, "alone_after_s": None},
}
"""A browser may take its time to show what a replica has said once."""


def state(replica_id: str, sequence: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "code_version": "test",
        "health": Health.READY,
        "mode": Mode.FULL,
        "restoring": False,
        "restore_progress": 1.0,
        "used_blocks": 30,
        "free_blocks": 10,
        "headroom_blocks": 70,
        "base_blocks": 40,
        "total_blocks": 100,
        "running": 3,
        "waiting": 0,
        "tokens_full": 900,
        "tokens_fast": 100,
        **changes,
    }
    return ReplicaState(
        replica_id=replica_id,
        sequence=sequence,
        sent_at_s=0.0,
        source=Source.ENGINE,
        **values,
    ).model_dump(mode="json")


class Site:
    """A controller without Ray, behind a plain HTTP server."""

    def __init__(self) -> None:
        self.controller = FleetController()
        self.configure({})
        self.up = True
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not site.up:
                    self.send_error(503)
                elif self.path == "/dps/":
                    self.reply(PAGE.read_bytes(), "text/html")
                elif self.path == "/dps/status":
                    status = asyncio.run(site.controller.status())
                    self.reply(bytes(status.body), "application/json")
                else:
                    self.send_error(404)

            def reply(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Security-Policy", PAGE_POLICY)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Nothing: the browser polls."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/dps/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def configure(self, user_config: dict[str, Any]) -> None:
        asyncio.run(self.controller.reconfigure({**PATIENT, **user_config}))

    def report(self, replica_id: str, sequence: int, **changes: Any) -> None:
        asyncio.run(self.controller.report(state(replica_id, sequence, **changes)))


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def row(replica_id: str) -> str:
    return f"[data-replica='{replica_id}']"


def test_page_shows_the_fleet_and_follows_it_by_itself(site: Site, window: Browser) -> None:
    site.report("calm", 1)
    site.report("busy", 1, mode=Mode.FAST, used_blocks=80, restore_progress=0.25)
    window.open(site.url)
    window.until("document.querySelectorAll('#replicas tr').length === 2")
    text = window.text(row("busy"))
    for shown in ("live", "fast", "80 %", "70 %", "25 %", "90 %"):
        assert shown in text
    assert "full" in window.text(row("calm"))
    site.report("busy", 2, mode=Mode.FAST, restoring=True, wants_restore=True)
    window.until(f"document.querySelector(\"{row('busy')}\").innerText.includes('restoring')")
    assert "waits: blind" in window.text(row("busy"))
    site.report("calm", 2, health=Health.DEAD, fault="the engine process has ended")
    window.until(f"document.querySelector(\"{row('calm')}\").innerText.includes('dead')")
    assert "1 of 2" in window.text("#summary").replace("\n", " ")
    assert "versions" not in window.text("#summary")
    site.report("next", 1, code_version="other")
    window.until("document.querySelector('#summary').innerText.includes('2 versions')")
    assert "other, test" in window.text("#summary")


def test_page_explains_a_decision_of_a_router(site: Site, window: Browser) -> None:
    site.report("roomy", 1)
    site.report("restoring", 1, restoring=True)
    view = FleetView(np.random.default_rng(0))
    view.offer([Peer("roomy"), Peer("restoring")], 0.0)
    listened = asyncio.run(site.controller.listen(None, 1.0))
    view.merge(Publication.model_validate(listened), 0.0)
    view.decide(0.1, Ask(session="someone"), limit=2)
    report = view.report("router-1").model_dump(mode="json")
    asyncio.run(site.controller.report_router(report))
    window.open(site.url)
    window.until("document.querySelectorAll('#decision tr').length === 2")
    first, second = window.text("#decision").split("\n")[:2]
    assert "roomy (chosen)" in first
    assert "queue 3.00 x 0.02" in first
    assert "restoring" in second
    assert "router-1" in window.text("#routers")


def test_page_says_when_the_controller_is_silent_and_when_it_is_back(
    site: Site, window: Browser
) -> None:
    site.report("a", 1)
    window.open(site.url)
    window.until("document.querySelector('#connection').innerText === 'live'")
    site.up = False
    window.until("document.querySelector('#connection').className === 'lost'")
    assert "what stands below is old" in window.text("#connection")
    assert window.text(row("a"))
    site.up = True
    window.until("document.querySelector('#connection').innerText === 'live'")


def test_refused_configuration_is_shown_as_text(site: Site, window: Browser) -> None:
    site.configure({"routing": {"name": "<script>alert(1)</script>"}})
    window.open(site.url)
    window.until("!document.querySelector('#error').hidden")
    assert "<script>" in window.text("#error")


def test_pin_without_a_replica_is_shown(site: Site, window: Browser) -> None:
    site.report("a", 1)
    site.configure({"pins": {"a": "full", "nobody": "fast"}})
    window.open(site.url)
    window.until("!document.querySelector('#error').hidden")
    assert "No replica has the name of these pins: nobody." in window.text("#error")


def test_dry_run_is_shown_from_the_moment_it_is_set(site: Site, window: Browser) -> None:
    """Also before it has decided anything; then with the tiers it would have chosen."""

    def shows(router: FleetView, text: str) -> None:
        report = router.report("router-1").model_dump(mode="json")
        asyncio.run(site.controller.report_router(report))
        window.until(f"document.querySelector('#routers').innerText.includes('{text}')")

    site.report("calm", 1)
    site.report("restoring", 1, restoring=True)
    view = FleetView(np.random.default_rng(0))
    view.offer([Peer("calm"), Peer("restoring")], 0.0)
    window.open(site.url)
    shows(view, "\\toff")
    site.configure({"dry_run": {"policy": {"name": "round_robin"}, "share": 1.0}})
    shows(view, "round_robin: nothing compared yet")
    listened = asyncio.run(site.controller.listen(None, 1.0))
    view.merge(Publication.model_validate(listened), 0.0)
    for step in range(4):
        view.decide(0.1 * step, Ask(), limit=1)
    figures = view.report("router-1").dry_run
    assert figures is not None
    assert figures.compared == 4
    assert (figures.agreed, figures.worse_tier) == (2, 2)
    shows(view, "round_robin: agrees 50 % of 4, regret")
    shows(view, f"own picks: 2 of a worse tier, {figures.better_tier} of a better")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_colour_schemes(
    site: Site, window: Browser, scheme: str, tmp_path: Path
) -> None:
    """Contrast of at least 4.5 to 1 (WCAG AA) for every colour that text has."""
    for number, changes in enumerate(
        (
            {},
            {"mode": Mode.FAST},
            {"restoring": True, "restore_progress": 0.4},
            {"health": Health.DEAD},
        )
    ):
        site.report(f"replica-{number}", 1, **changes)
    window.prefer(scheme)
    window.open(site.url)
    window.until("document.querySelectorAll('#replicas tr').length === 4")
    window.screenshot(tmp_path / f"{scheme}.png")
    found = window.run(CONTRASTS)
    assert len(found) > 20
    assert min(found) >= 4.5
    assert window.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(246, 247, 249)" if scheme == "light" else "rgb(16, 21, 28)"
    )


CONTRASTS = """(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = channels(colour).map((c) => c / 255)
      .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (channels(colour)[3] !== 0) return colour;
    }
  };
  return [...document.querySelectorAll('h1,h2,th,td,dt,dd,p,span.tag')]
    .filter((node) => node.innerText && node.offsetParent)
    .map((node) => {
      const [a, b] = [getComputedStyle(node).color, behind(node)].map(luminance);
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    });
})()"""
