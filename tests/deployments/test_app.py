"""What the builders refuse: one line each, before anything is started."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from dps_autoscaling.ray_version import require_supported_ray
from dps_deployments.app import (
    build_controller,
    build_fleet,
    check_model_source,
    to_llm_config,
)
from dps_deployments.fleet_args import (
    TIMEOUT_VARIABLE,
    ingress_kwargs,
    ingress_options,
    parse_fleet_args,
)
from dps_deployments.ray_adapter import skip_fetching
from dps_deployments.server import FLEET_CONFIG_KEY, DpsLLMServer
from ray.llm._internal.common.callbacks.base import CallbackBase

from dps_ray.config import DpsConfigError
from dps_ray.engine import vllm_version
from dps_ray.models.tiny import make_tiny

GOOD: dict[str, Any] = {
    "llm_config": {
        "model_loading_config": {"model_id": "m", "model_source": "./no-such-model"},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {
            "max_model_len": 512,
            "quantization": "dps",
            "additional_config": {"dps": {"pin": "auto"}},
        },
        "deployment_config": {"max_ongoing_requests": 8},
    },
    "ingress": {"max_ongoing_requests": 64},
}


def changed(*path: str, value: Any) -> dict[str, Any]:
    args = deepcopy(GOOD)
    target = args
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return args


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (changed("llm_confg", value={}), "args.llm_confg is not an option"),
        ({}, "args.llm_config is missing"),
        (
            changed("llm_config", "engine_kwargs", "additional_config", "dps", "pin", value="ful"),
            r"args.llm_config.engine_kwargs.additional_config.dps.pin is 'ful'",
        ),
        (
            changed("llm_config", "engine_kwargs", "additional_config", "dps", value={"pni": 1}),
            "dps.pni is not an option",
        ),
        (
            changed("llm_config", "engine_kwargs", "quantization", value=None),
            "quantization is None while additional_config.dps is given",
        ),
        (
            changed("llm_config", "deployment_config", "num_replicaz", value=3),
            "deployment_config.num_replicaz is not an option",
        ),
        (
            changed("llm_config", "deployment_config", value={}),
            "max_ongoing_requests is not set",
        ),
        (
            changed("llm_config", "deployment_config", value=None),
            "deployment_config is None: give a mapping",
        ),
        (
            changed("llm_config", "engine_kwargs", value=None),
            "engine_kwargs is None: give a mapping",
        ),
        (
            changed("llm_config", "engine_kwargs", "additional_config", value="dps"),
            "additional_config is 'dps': give a mapping",
        ),
        ({1: 2, **GOOD}, "args.1 is 1: Keys should be strings"),
        (
            changed("report", value={"poll_period_s": 2.0, "heartbeat_s": 1.0}),
            "poll_period_s",
        ),
        (changed("ingress", value={}), "args.ingress.max_ongoing_requests is not set"),
        (
            changed("llm_config", "engine_kwargs", "max_model_len", value=-1),
            "max_model_len is -1: nothing but the body's size",
        ),
        (
            changed("llm_config", "engine_kwargs", "max_model_length", value=9),
            r"engine_kwargs\.max_model_length is not an option of vLLM",
        ),
        (GOOD, "model_source is '.*no-such-model': there is no config.json"),
    ],
)
def test_wrong_argument_is_named_in_one_line(args: dict[str, Any], message: str) -> None:
    with pytest.raises(DpsConfigError, match=message) as raised:
        build_fleet(args)
    assert "\n" not in str(raised.value)


def test_ingress_lets_a_request_last_as_long_as_the_arguments_say() -> None:
    actor = {"num_cpus": 0, "runtime_env": {"env_vars": {"A": "1"}}}
    args = {
        **GOOD,
        "request_timeout_s": 1200,
        "ingress": {"max_ongoing_requests": 64, "ray_actor_options": actor},
    }
    assert ingress_options(parse_fleet_args(args))["ray_actor_options"] == {
        "num_cpus": 0,
        "runtime_env": {"env_vars": {"A": "1", TIMEOUT_VARIABLE: "1200"}},
    }


def test_ingress_learns_the_context_the_policy_and_its_own_number() -> None:
    engine = {**GOOD["llm_config"]["engine_kwargs"], "max_model_len": 100}
    args = {
        **GOOD,
        "llm_config": {**GOOD["llm_config"], "engine_kwargs": engine},
        "limits": {"max_prompts": 3},
    }
    told = ingress_kwargs(parse_fleet_args(args))
    assert told["limits"].max_prompts == 3
    assert (told["limits"].max_prompt_tokens, told["limits"].max_prompt_chars) == (100, 1600)
    assert (told["priorities"], told["ingress_replicas"]) == (False, 1)
    engine["scheduling_policy"] = "priority"
    args["ingress"] = {"num_replicas": 2, "max_ongoing_requests": 64}
    told = ingress_kwargs(parse_fleet_args(args))
    assert (told["priorities"], told["ingress_replicas"]) == (True, 2)


def test_longest_request_cannot_be_set_past_the_arguments() -> None:
    actor = {"runtime_env": {"env_vars": {TIMEOUT_VARIABLE: "60"}}}
    with pytest.raises(DpsConfigError, match=r"give args\.request_timeout_s"):
        parse_fleet_args({**GOOD, "ingress": {"ray_actor_options": actor}})


def test_controller_takes_no_arguments() -> None:
    with pytest.raises(DpsConfigError, match="user_config"):
        build_controller({"routing": {"name": "mode_aware"}})


def test_unsupported_ray_is_named_with_the_one_to_install() -> None:
    with pytest.raises(DpsConfigError, match=r"ray is 2\.61\.0.*2\.60\.0"):
        require_supported_ray("2.61.0")
    require_supported_ray("2.60.1")


def test_unsupported_vllm_is_refused_before_the_arguments_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_version, "installed_version", lambda: "0.30.0")
    with pytest.raises(DpsConfigError, match=r"vllm is 0\.30\.0"):
        build_fleet(GOOD)


def test_model_folder_is_looked_into_before_anything_is_built(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    args = changed("llm_config", "model_loading_config", value={"model_id": "m"})
    args["llm_config"]["model_loading_config"]["model_source"] = str(folder)
    args["llm_config"]["engine_kwargs"]["additional_config"]["dps"]["unit_bytes"] = 1 << 40
    with pytest.raises(DpsConfigError, match=r"dps.unit_bytes is 1099511627776: .*use at most"):
        build_fleet(args)


def test_hub_ids_and_remote_addresses_are_left_to_the_engine() -> None:
    for source in ("Qwen/Qwen3-8B", "s3://bucket/model", None):
        check_model_source(source)


def test_model_folder_is_made_absolute_for_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    llm_config = to_llm_config(parse_fleet_args(GOOD))
    assert llm_config.model_loading_config.model_source == str(tmp_path / "no-such-model")


def test_only_a_model_that_lies_in_a_folder_here_is_not_fetched(tmp_path: Path) -> None:
    def fetched(source: str, **more: Any) -> bool:
        args = changed("llm_config", "model_loading_config", "model_source", value=source)
        args["llm_config"].update(more)
        llm_config = to_llm_config(parse_fleet_args(args))
        # Made with a placement group of the replica otherwise.
        llm_config._callback_instance = CallbackBase(llm_config)
        skip_fetching(llm_config)
        return bool(llm_config.get_or_create_callback().ctx.run_init_node)

    assert not fetched(str(tmp_path))
    assert fetched(str(tmp_path / "missing"))
    assert fetched("Qwen/Qwen3-0.6B")
    assert fetched(str(tmp_path), callback_config={"callback_kwargs": {"own": 1}})
    assert fetched(str(tmp_path), accelerator_config={"kind": "gpu"})


def test_fleet_gets_the_reporting_server_and_the_mode_aware_router() -> None:
    llm_config = to_llm_config(parse_fleet_args({**GOOD, "controller_app": "other"}))
    assert llm_config.server_cls is DpsLLMServer
    assert llm_config.experimental_configs[FLEET_CONFIG_KEY]["controller_app"] == "other"
    router = llm_config.deployment_config["request_router_config"]
    assert router["request_router_class"] == "dps_deployments.router.DpsRouter"
    assert router["request_router_kwargs"]["controller_app"] == "other"


def test_an_own_request_router_is_kept() -> None:
    own = {"request_routing_stats_period_s": 9.0}
    args = changed("llm_config", "deployment_config", "request_router_config", value=own)
    llm_config = to_llm_config(parse_fleet_args(args))
    assert llm_config.deployment_config["request_router_config"] == own


def test_queue_before_the_replicas_is_bounded_unless_the_config_says_otherwise() -> None:
    llm_config = to_llm_config(parse_fleet_args(GOOD))
    assert llm_config.deployment_config["max_queued_requests"] == 64
    args = changed("llm_config", "deployment_config", "max_queued_requests", value=5)
    own = to_llm_config(parse_fleet_args(args))
    assert own.deployment_config["max_queued_requests"] == 5
