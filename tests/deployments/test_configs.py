"""The shipped Serve config files, built with the real classes of Ray."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from dps_deployments.app import to_llm_config
from dps_deployments.controller_client import CONTROLLER_DEPLOYMENT
from dps_deployments.fleet_args import FleetArgs, ingress_options, parse_fleet_args
from ray.serve.schema import ServeDeploySchema

from dps_ray.fleet.publication import parse_controller_options

CONFIGS = sorted((Path(__file__).parents[2] / "deployments/configs").glob("*.yaml"))
GPUS = {"qwen3-30b-a3b": 1, "phi-3.5-moe": 2, "glm-4.7-flash": 1, "qwen3-8b": 1, "local": 0}


def applications(path: Path) -> dict[str, dict[str, Any]]:
    """Applications of a config file by the name of their builder."""
    document = yaml.safe_load(path.read_text())
    ServeDeploySchema.model_validate(document)
    return {app["import_path"].partition(":")[2]: app for app in document["applications"]}


def fleet_args(path: Path) -> FleetArgs:
    return parse_fleet_args(applications(path)["build_fleet"]["args"])


def test_the_models_of_the_paper_and_the_demo_have_a_config() -> None:
    assert {path.stem for path in CONFIGS} == set(GPUS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_the_real_llm_config(path: Path) -> None:
    engine = to_llm_config(fleet_args(path)).get_engine_config()
    bundles = engine.placement_bundles
    assert sum(bundle.get("GPU", 0) for bundle in bundles) == GPUS[path.stem]
    assert engine.num_devices == max(1, GPUS[path.stem])
    assert engine.engine_kwargs["quantization"] == "dps"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_names_the_controller_and_configures_it(path: Path) -> None:
    apps = applications(path)
    controller = apps["build_controller"]
    assert fleet_args(path).controller_app == controller["name"]
    assert controller["route_prefix"] == "/dps"
    (deployment,) = controller["deployments"]
    assert deployment["name"] == CONTROLLER_DEPLOYMENT
    parse_controller_options(deployment["user_config"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_bounds_what_a_replica_takes(path: Path) -> None:
    deployment = fleet_args(path).llm_config["deployment_config"]
    batch = fleet_args(path).llm_config["engine_kwargs"]["max_num_seqs"]
    assert batch <= deployment["max_ongoing_requests"] <= 10 * batch
    assert deployment["health_check_period_s"] <= 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_replica_that_stops_outlives_its_longest_stream(path: Path) -> None:
    stream_s = yaml.safe_load(path.read_text())["http_options"]["request_timeout_s"]
    fleet = fleet_args(path)
    deployment = to_llm_config(fleet).deployment_config
    for options in (deployment, ingress_options(fleet)):
        assert options["graceful_shutdown_timeout_s"] > stream_s
