"""One private Ray cluster with one fleet, started and stopped by the demo."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from dps_ray.demo.processes import (
    adopt_orphans,
    deaf_to_interrupts,
    descendants,
    stop_descendants,
)
from dps_ray.demo.serve_config import FleetConfig, free_port

POLL_S = 0.5
STOP_GRACE_S = 8.0
RAY_START_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 100 << 20
LOG_TAIL_LINES = 30


class FleetError(RuntimeError):
    """The fleet did not start, or something of it could not be stopped."""


class Fleet:
    """A running fleet.

    Attributes
    ----------
    url
        Root of its HTTP server.
    address
        Of its Ray cluster.
    """

    def __init__(
        self,
        url: str,
        address: str,
        replicas: int,
        server: subprocess.Popen[bytes],
        log: Path,
    ) -> None:
        self.url = url
        self.address = address
        self._replicas = replicas
        self._server = server
        self._log = log

    def status(self) -> dict[str, Any] | None:
        """The controller's status; ``None`` while it does not answer."""
        try:
            response = httpx.get(f"{self.url}/dps/status", timeout=2.0, trust_env=False)
        except httpx.TransportError:
            return None
        return response.json() if response.status_code == httpx.codes.OK else None

    def wait_until_ready(self, timeout_s: float, progress: Callable[[str], None]) -> None:
        """Return when every replica is live and the API lists the model.

        Parameters
        ----------
        timeout_s
            Longest wait, seconds.
        progress
            Gets one line whenever something changed.

        Raises
        ------
        FleetError
            The server process ended, or time is up; the message ends with its last output.
        """
        deadline_s = time.monotonic() + timeout_s
        stage = "starting Ray and Serve"
        progress(stage)
        while True:
            if self._server.poll() is not None:
                raise FleetError(f"the fleet's server ended early\n{log_tail(self._log)}")
            if time.monotonic() > deadline_s:
                raise FleetError(
                    f"not ready after {timeout_s:.0f} s ({stage})\n{log_tail(self._log)}"
                )
            live = self._live_replicas()
            if live == self._replicas and self._lists_a_model():
                return
            if live is not None:
                now = f"loading the model: {live} of {self._replicas} replicas ready"
                if now != stage:
                    stage = now
                    progress(stage)
            time.sleep(POLL_S)

    def _live_replicas(self) -> int | None:
        """Replicas that are ready; ``None`` while the controller does not answer."""
        status = self.status()
        if status is None:
            return None
        return sum(entry["standing"] == "live" for entry in status["replicas"])

    def _lists_a_model(self) -> bool:
        try:
            response = httpx.get(f"{self.url}/v1/models", timeout=5.0, trust_env=False)
        except httpx.TransportError:
            return False
        return response.status_code == httpx.codes.OK


@contextmanager
def running_fleet(config: FleetConfig, model_source: str) -> Iterator[Fleet]:
    """Start a fleet on a Ray cluster of its own; stop both and everything under them at the end.

    The cluster has its own ports and temporary folder: clusters that already run on the machine
    are neither used nor touched.

    Parameters
    ----------
    config
        What to serve. The port it names is replaced by a free one.
    model_source
        Folder or Hub id of the model.

    Raises
    ------
    FleetError
        A process could not be stopped.
    """
    adopt_orphans()
    before = descendants()
    # Ray puts Unix sockets here, whose paths may have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="dps-", dir="/tmp"))
    try:
        ports = {name: free_port() for name in ("gcs", "client", "http")}
        log = folder / "serve.log"
        settings = config.placed(port=ports["http"], model_source=model_source)
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(settings.content))
        cores = max(os.cpu_count() or 1, config.max_replicas)
        ray = _start(
            [
                *("ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
                *("--port", str(ports["gcs"]), "--ray-client-server-port", str(ports["client"])),
                *("--node-ip-address", "127.0.0.1", "--include-dashboard", "false"),
                *("--num-cpus", str(cores), "--object-store-memory", str(OBJECT_STORE_BYTES)),
                *("--temp-dir", str(folder / "ray")),
            ],
            folder,
            folder / "ray.log",
        )
        _wait_for_port(ports["gcs"], ray, folder / "ray.log")
        address = f"127.0.0.1:{ports['gcs']}"
        server = _start(["ray.serve.scripts", "run", "-a", address, str(path)], folder, log)
        yield Fleet(f"http://127.0.0.1:{ports['http']}", address, config.replicas, server, log)
    finally:
        with deaf_to_interrupts():
            left = stop_descendants(before, grace_s=STOP_GRACE_S)
            shutil.rmtree(folder, ignore_errors=True)
        if left:
            raise FleetError(f"processes {sorted(left)} could not be stopped")


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + RAY_START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(POLL_S)
    raise FleetError(f"Ray did not start\n{log_tail(log)}")


def log_tail(log: Path) -> str:
    """Last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _start(module: list[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a session of its own, so that Ctrl-C reaches the demo alone."""
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(folder),
        # Without an explicit mode Ray picks up a token that other clusters may have left.
        "RAY_AUTH_MODE": "disabled",
        # A dead HTTP proxy is replaced after three failed checks: half a minute by default.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
