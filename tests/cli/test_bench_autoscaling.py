"""``dps-ray bench autoscaling``: the shipped policy on the bundled burst, drawn."""

import json
from pathlib import Path

import pytest
import yaml

from dps_ray.cli.bench_autoscaling import DEFAULT_CONFIG
from dps_ray.cli.main import main


def test_fleet_follows_the_recorded_burst_without_flapping_and_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "fleet.png"
    assert main(["bench", "autoscaling", "--json", "--out", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] is True
    assert found["most_replicas"] >= 4
    assert found["turns"] <= 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_another_policy_than_the_elastic_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load(DEFAULT_CONFIG.read_text())
    deployment = document["applications"][1]["args"]["llm_config"]["deployment_config"]
    del deployment["autoscaling_config"]["policy"]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    assert main(["bench", "autoscaling", "--config", str(config)]) == 2
    assert "ElasticScalingPolicy" in capsys.readouterr().err


def test_config_without_autoscaling_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("applications: []\n")
    assert main(["bench", "autoscaling", "--config", str(config)]) == 2
    assert (
        "no application has args.llm_config.deployment_config.autoscaling"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("flag", ["--copies", "--stretch"])
def test_burst_of_nothing_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "autoscaling", flag, "0"]) == 2
    assert f"{flag} is 0: give" in capsys.readouterr().err
