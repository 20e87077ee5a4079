"""The demo reads any fleet configuration and changes only the port and the model's place."""

from pathlib import Path

import pytest
import yaml

from dps_ray.cli.demo import DEFAULT_CONFIG
from dps_ray.config import DpsConfigError
from dps_ray.demo.load import DemoLoad
from dps_ray.demo.serve_config import read_config


def test_shipped_configuration_is_one_the_demo_can_run() -> None:
    config = read_config(DEFAULT_CONFIG)
    assert config.replicas == 2
    assert config.model_id == "smollm2-135m-instruct"
    trace = DemoLoad().requests(config.max_model_len)
    assert all(each.prompt_tokens + each.output_tokens <= config.max_model_len for each in trace)


def test_burst_presses_on_the_base_kv_memory_and_fits_the_elastic_one() -> None:
    trace = DemoLoad().requests(1024)
    burst = [each for each in trace if each.arrival_s < 15.0]
    tokens_per_replica = sum(each.prompt_tokens + each.output_tokens for each in burst) / 2
    # 27 base and 144 elastic blocks of 32 tokens a replica.
    assert 27 * 32 < tokens_per_replica < 171 * 32


def test_placing_a_configuration_changes_port_and_model_folder_only(tmp_path: Path) -> None:
    config = read_config(DEFAULT_CONFIG)
    placed = config.placed(port=1234, model_source="/models/x")
    assert placed.content["http_options"]["port"] == 1234
    assert placed.model_source == "/models/x"
    placed.content["http_options"]["port"] = config.content["http_options"]["port"]
    placed.fleet["model_loading_config"]["model_source"] = config.model_source
    assert placed.content == yaml.safe_load(DEFAULT_CONFIG.read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: [", "is not YAML"),
        ("applications: []", "none has import_path"),
        ("{}", "'applications' is missing"),
        (
            "applications:\n- import_path: dps_deployments.app:build_fleet\n  args: {}\n",
            "'llm_config' is missing",
        ),
    ],
)
def test_wrong_configuration_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(DpsConfigError, match=message):
        read_config(path)


def test_missing_configuration_is_named() -> None:
    with pytest.raises(
        DpsConfigError, match=r"config is '.*nowhere\.yaml', which cannot be read: "
    ):
        read_config(Path("nowhere.yaml"))
