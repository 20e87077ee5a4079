"""A headless Chromium, driven over the WebDriver protocol."""

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = None if DRIVER and BROWSER else "no Chromium: apt-get install chromium chromium-driver"


class Browser:
    """One browser session."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression in the page."""
        return self._post("execute/sync", script=f"return {script}", args=[])

    def text(self, selector: str) -> str:
        """Visible text of the first element that matches."""
        return str(self.run(f"document.querySelector({selector!r}).innerText"))

    def until(self, expression: str, timeout_s: float = 60.0) -> None:
        """Wait until a JavaScript expression holds."""
        deadline_s = time.monotonic() + timeout_s
        while not self.run(expression):
            assert time.monotonic() < deadline_s, f"never held: {expression}"
            time.sleep(0.05)

    def prefer(self, scheme: str) -> None:
        """Switch the preferred colour scheme, ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._post(
            "goog/cdp/execute",
            cmd="Emulation.setEmulatedMedia",
            params={"features": [feature]},
        )

    def screenshot(self, path: Path) -> None:
        answer = self._http.get(f"/session/{self._session}/screenshot").raise_for_status()
        path.write_bytes(base64.b64decode(answer.json()["value"]))

    def _post(self, command: str, **fields: Any) -> Any:
        answer = self._http.post(f"/session/{self._session}/{command}", json=fields)
        assert answer.is_success, answer.text
        return answer.json()["value"]


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser and end it again."""
    assert DRIVER is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http:
            _wait_until_up(http)
            options = {
                "binary": BROWSER,
                "args": [
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--window-size=1280,1000",
                ],
            }
            wanted = {"alwaysMatch": {"goog:chromeOptions": options}}
            answer = http.post("/session", json={"capabilities": wanted})
            assert answer.is_success, answer.text
            session = answer.json()["value"]["sessionId"]
            yield Browser(http, session)
            http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(timeout=60)


def _wait_until_up(http: httpx.Client) -> None:
    for _ in range(1200):
        try:
            if http.get("/status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("chromedriver did not start")
