"""``dps-ray validate`` on what a replica or Serve would refuse only when it starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps_ray.cli.main import main

ENGINE = "applications.1.args.llm_config.engine_kwargs"
LOCAL = Path(__file__).parents[2] / "deployments/configs/local.yaml"
VALUES = [
    ({"max_num_seqs": "many"}, "max_num_seqs is 'many': Input should be a valid integer"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0: Input should be greater than or equal to 1"),
    ({"tensor_parallel_size": "2"}, "tensor_parallel_size is '2': write 2"),
    ({"dtype": "float33"}, "dtype is 'float33': did you mean 'float32'? choose one of auto, half"),
    (
        {"quantization": "dsp", "additional_config": {}},
        "quantization is 'dsp': did you mean 'dps'? choose one of",
    ),
    ({"quantization": "DPS", "additional_config": {}}, "quantization is 'DPS': choose one of"),
    ({"enforce_eager": None}, "enforce_eager is None: Input should be a valid boolean"),
    ({"optimization_level": "O0"}, "optimization_level is 'O0': Input should be 0, 1, 2 or 3"),
    ({"max_lora_rank": "x"}, "max_lora_rank is 'x': Input should be 1, 8, 16"),
    ({"attention_backend": "FLASH"}, "attention_backend is 'FLASH': did you mean"),
    ({"max_num_sequences": 4}, "max_num_sequences is not an option of vLLM: did you mean 'max_num"),
    ({"compilation_config": {"mod": 1}}, "compilation_config.mod is not an option"),
    ({"gpu_memory_utilization": 92}, "gpu_memory_utilization is 92: Input should be less than or"),
    ({"chat_template": 3}, "chat_template is 3: Input should be a valid string"),
    (
        {"max_num_batched_tokens": 8, "max_num_seqs": 16},
        "max_num_batched_tokens is 8: max_num_batched_tokens (8) must be greater than or equal to",
    ),
]
FEATURES = [
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, which does not go with quant"),
    ({"speculative_config": {"model": "x"}}, "speculative_config is {'model': 'x'}, which does"),
    ({"enable_lora": True}, "enable_lora is True, which does not go with quantization 'dps': ada"),
    ({"enable_expert_parallel": True}, "enable_expert_parallel is True, which does not go with"),
    ({"weight_transfer_config": {"backend": "nccl"}}, "start replicas of the new checkpoint"),
    ({"data_parallel_size": 2}, "one replica is one engine on one host; start more replicas"),
    ({"kv_offloading_size": 1.5}, "kv_offloading_size is 1.5, which does not go with"),
    ({"worker_cls": "other.Worker"}, "worker_cls is 'other.Worker', which does not go with"),
    ({"tensor_parallel_size": 128}, "tensor_parallel_size is 128, which does not go with"),
    ({"additional_config": {"dps": {}, "dsp": {}}}, "additional_config.dsp is not an option: did"),
    ({"additional_config": {"dsp": {}}}, "additional_config.dsp is not an option: did you mean"),
    ({"additional_config": {"lend": False}}, "lend is not read: move it to additional_config.dps"),
]
ON_GPUS = [
    ({"enable_dbo": True}, "enable_dbo is True, which does not go with"),
    ({"compilation_config": {"cudagraph_mm_encoder": True}}, "cudagraph_mm_encoder is True"),
    (
        {"enforce_eager": False, "additional_config": {"dps": {"kernel": "exact"}}},
        "additional_config.dps.kernel is 'exact': it rebuilds 16-bit weights",
    ),
]


def problems(document: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    main(["validate", "--json", str(file)])
    return [problem["text"] for problem in json.loads(capsys.readouterr().out)["problems"]]


@pytest.fixture
def document() -> Any:
    """A file without a fault."""
    return yaml.safe_load(LOCAL.read_text())


@pytest.mark.parametrize(("changes", "message"), [*VALUES, *FEATURES])
def test_what_an_engine_would_refuse_is_refused_before(
    document: Any,
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document["applications"][1]["args"]["llm_config"]["engine_kwargs"] |= changes
    (problem,) = problems(document, tmp_path, capsys)
    assert problem.startswith(ENGINE)
    assert message in problem


@pytest.mark.parametrize(("changes", "message"), ON_GPUS)
def test_what_only_gpus_refuse_is_refused_for_them_alone(
    document: Any,
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm_config = document["applications"][1]["args"]["llm_config"]
    llm_config["engine_kwargs"] |= changes
    assert not problems(document, tmp_path, capsys)
    llm_config["accelerator_config"] = {"kind": "gpu"}
    (problem,) = problems(document, tmp_path, capsys)
    assert message in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"enforce_eager": True},
        {"optimization_level": 0},
        {"compilation_config": {"cudagraph_mode": "NONE"}},
    ],
)
def test_options_that_graphs_cannot_obey_pass_where_none_are_captured(
    document: Any, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm_config = document["applications"][1]["args"]["llm_config"]
    llm_config["accelerator_config"] = {"kind": "gpu"}
    llm_config["engine_kwargs"].pop("enforce_eager", None)
    llm_config["engine_kwargs"]["additional_config"] = {
        "dps": {"kernel": "exact", "return_by": "layer"}
    }
    assert len(problems(document, tmp_path, capsys)) == 2
    llm_config["engine_kwargs"] |= changes
    assert not problems(document, tmp_path, capsys)


def test_fleet_whose_bundles_hold_no_gpu_is_one_on_cpus(
    document: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm_config = document["applications"][1]["args"]["llm_config"]
    del llm_config["accelerator_config"], llm_config["placement_group_config"]
    llm_config["engine_kwargs"]["enable_dbo"] = True
    (problem,) = problems(document, tmp_path, capsys)
    assert "enable_dbo is True" in problem
    llm_config["placement_group_config"] = {"bundles": [{"CPU": 1}]}
    assert not problems(document, tmp_path, capsys)


def test_keys_of_other_plugins_are_left_to_them(
    document: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = document["applications"][1]["args"]["llm_config"]["engine_kwargs"]
    engine["additional_config"] = {"dps": {}, "other_plugin": {}}
    assert not problems(document, tmp_path, capsys)
    del engine["quantization"]
    engine["additional_config"] = {"kernel": "x", "driver": 1, "ops": {}}
    assert not problems(document, tmp_path, capsys)


def test_faults_of_all_kinds_are_told_together(
    document: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = document["applications"][1]["args"]["llm_config"]["engine_kwargs"]
    engine |= {"max_num_seqs": "many", "dtyp": "half", "pipeline_parallel_size": 2}
    engine["additional_config"] = {"dps": {"low_watermark": 2}}
    found = problems(document, tmp_path, capsys)
    named = ("max_num_seqs", "dtyp", "pipeline_parallel_size", "additional_config.dps.low_water")
    assert len(found) == len(named)
    for name in named:
        assert any(text.startswith(f"{ENGINE}.{name}") for text in found), found


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("dps_deployments.app:build_flet", "has no build_flet; did you mean 'build_fleet'? give"),
        ("dps_deploymens.app:build_fleet", "no dps_deploymens; did you mean 'dps_deployments'?"),
        ("dps_deployments.apps:build_fleet", "No module named 'dps_deployments.apps'; give mod"),
        ("dps_deployments.app:QUEUE_FACTOR", "which is a value of type int: give a function"),
        ("dps_deployments.app", "'dps_deployments.app', which is a value of type module"),
    ],
)
def test_import_path_that_leads_to_no_builder_is_named(
    document: Any, path: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document["applications"][1]["import_path"] = path
    found = problems(document, tmp_path, capsys)
    assert any(f"applications.1.import_path is {path!r}" in text for text in found), found
    assert any(message in text for text in found), found


def test_builder_after_a_dot_is_the_same_builder(
    document: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = document["applications"][1]
    fleet["import_path"] = "dps_deployments.app.build_fleet"
    fleet["args"]["controller_app"] = "other"
    (problem,) = problems(document, tmp_path, capsys)
    assert "controller_app is 'other'" in problem


def test_code_that_only_the_cluster_may_have_is_not_looked_for(
    document: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"name": "own", "route_prefix": "/own", "import_path": "own_code:app"}
    document["applications"].append(other)
    assert not problems(document, tmp_path, capsys)
    other["import_path"] = "dps_deployments.of_another_release:app"
    (problem,) = problems(document, tmp_path, capsys)
    assert "No module named" in problem
    other["runtime_env"] = {"working_dir": "https://example.com/own.zip"}
    assert not problems(document, tmp_path, capsys)


LLM = "applications.1.args.llm_config"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("http_options.port", 80000, "http_options.port is 80000: give a number from 0 to 65535"),
        ("grpc_options", {"port": -1}, "grpc_options.port is -1: give a number from 0 to 65535"),
        ("applications.1.route_prefix", "llm/", "route_prefix is 'llm/': begin it with '/'"),
        ("applications.0.route_prefix", "/", "applications: Found duplicate applications for"),
        ("applications.1.runtime_env", {"env_var": {}}, "env_var is not an option: did you mean"),
        (f"{LLM}.runtime_env", {"env_vars": {"A": 1}}, "llm_config.runtime_env: runtime_env['env"),
        (
            f"{LLM}.deployment_config.ray_actor_options",
            {"runtime_env": {"pipp": []}},
            "ray_actor_options.runtime_env.pipp is not an option: did you mean 'pip'?",
        ),
        (f"{LLM}.model_loading_config", {}, "model_loading_config.model_id is missing"),
        (f"{LLM}.accelerator_config", {"kind": "cpuu"}, "kind is 'cpuu': did you mean 'cpu'?"),
        (f"{LLM}.server_cls", "no.Server", "llm_config.server_cls is 'no.Server': Could not imp"),
        ("applications.0.deployments.0.num_replicas", 3, "num_replicas is 3: a fleet has one con"),
    ],
)
def test_what_serve_would_refuse_only_when_it_deploys_is_named(
    document: Any,
    path: str,
    value: Any,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put(document, path, value)
    (problem,) = problems(document, tmp_path, capsys)
    assert message in problem


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("grpc_options", {"port": 0}),
        ("applications.1.runtime_env", {"nsight": "default"}),
        ("applications.1.runtime_env", {"_nsight": "default", "plugin_of_ours": {"a": 1}}),
        (f"{LLM}.runtime_env", {"pip": "/home/ray/requirements.txt"}),
        (f"{LLM}.runtime_env", {"uv": "/home/ray/requirements.txt"}),
        (f"{LLM}.runtime_env", {"conda": "environment.yml"}),
        (f"{LLM}.deployment_config.ray_actor_options", {"runtime_env": {"conda": "/opt/env"}}),
    ],
)
def test_what_the_cluster_takes_passes(
    document: Any, path: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(document, path, value)
    assert not problems(document, tmp_path, capsys)


def put(document: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    place[last] = value


@pytest.mark.parametrize("replicas", [-1, 0, "many", 1.5, True])
def test_impossible_number_of_replicas_is_told_what_is_possible(
    document: Any, replicas: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document["applications"][1]["args"]["llm_config"]["deployment_config"]["num_replicas"] = (
        replicas
    )
    (problem,) = problems(document, tmp_path, capsys)
    assert f"is {replicas!r}: give a whole number of at least 1, or 'auto'" in problem
