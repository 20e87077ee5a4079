"""``dps-ray bench fleet`` on a fleet small enough for the suite."""

import json
import subprocess
import sys

import pytest

from dps_ray.cli.main import main


def test_bench_fleet_measures_controller_and_every_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["bench", "fleet", "--replicas", "20", "--decisions", "200", "--seconds", "2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["controller"]["reports_per_s"] == 20
    assert 0.0 < report["controller"]["core_share"] < 1.0
    assert len(report["decisions"]) == 5
    for figures in report["decisions"].values():
        assert 0.0 < figures["p50_us"] <= figures["p99_us"] <= figures["max_us"]


@pytest.mark.parametrize("flag", ["--replicas", "--decisions", "--seconds"])
def test_fleet_of_nothing_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fleet", flag, "0"]) == 2
    assert f"{flag} is 0: give a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.cluster
def test_controller_is_measured_as_it_is_deployed() -> None:
    command = "bench fleet --serve --replicas 20 --decisions 200 --seconds 5 --json"
    # In a process of its own: the cluster of other tests may be connected to this one.
    done = subprocess.run(
        [sys.executable, "-m", "dps_ray.cli.main", *command.split()],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    # 1: on a busy machine some limit is not kept.
    assert done.returncode in (0, 1), done.stderr
    serve = json.loads(done.stdout)["serve"]
    # Callers whose loops stood still may take the port for closed for some seconds.
    assert serve["direct"]["by_handle"] < serve["handle"]["by_handle"] / 2
    for figures in serve.values():
        # Of 20; players that stood still for seconds have sent fewer.
        assert 4 < figures["reports_per_s"] < 25
        assert 0.0 < figures["core_share"] < 1.0
        assert figures["publications_per_s"] > 0
        assert 0.0 < figures["round_trip_p50_ms"] <= figures["round_trip_p99_ms"]
        assert 0.0 < figures["router_age_p50_ms"] <= figures["router_age_p99_ms"]
