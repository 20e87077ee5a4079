"""The serve config and the cluster that is to run it: capacity, drain times, model."""

from typing import Any

import pytest
import yaml

Config = dict[str, Any]
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


@pytest.fixture(scope="module")
def llm(serve_config: Config) -> Config:
    found = [app["args"]["llm_config"] for app in serve_config["applications"] if app.get("args")]
    (llm_config,) = found
    assert isinstance(llm_config, dict)
    return llm_config


@pytest.fixture
def worker_group(rayservice: Config) -> Config:
    (group,) = rayservice["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert isinstance(group, dict)
    return group


def replica_bounds(deployment: Config) -> tuple[int, int]:
    scaling = deployment.get("autoscaling_config")
    if scaling is None:
        return deployment["num_replicas"], deployment["num_replicas"]
    return scaling["min_replicas"], scaling["max_replicas"]


def test_workers_have_the_gpus_of_every_replica(llm: Config, worker_group: Config) -> None:
    limits = worker_group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = int(limits["nvidia.com/gpu"])
    per_replica = llm["engine_kwargs"].get("tensor_parallel_size", 1)
    assert gpus % per_replica == 0, "a replica's GPUs must share a worker"
    fewest, most = replica_bounds(llm["deployment_config"])
    assert worker_group["minReplicas"] * gpus >= fewest * per_replica
    assert worker_group["maxReplicas"] * gpus > most * per_replica, "no room to move a replica"


def test_memory_arithmetic_is_of_the_model_that_is_served(llm: Config) -> None:
    assert llm["model_loading_config"]["model_source"] == "Qwen/Qwen3-30B-A3B"
    assert llm["engine_kwargs"]["quantization"] == "dps"


def test_pod_lives_until_streams_and_replicas_have_ended(
    serve_config: Config, llm: Config, worker_group: Config
) -> None:
    pod = worker_group["template"]["spec"]
    (drain,) = [e["value"] for e in pod["containers"][0]["env"] if e["name"] == DRAIN]
    stream_s = serve_config["http_options"]["request_timeout_s"]
    replica_s = llm["deployment_config"]["graceful_shutdown_timeout_s"]
    assert max(stream_s, replica_s) < int(drain) < pod["terminationGracePeriodSeconds"]


def test_pinned_ray_reads_the_drain_variable() -> None:
    from ray._private import ray_constants

    assert hasattr(ray_constants, DRAIN)


def test_old_cluster_outlives_the_longest_stream(serve_config: Config, rayservice: Config) -> None:
    longest_s = serve_config["http_options"]["request_timeout_s"]
    assert rayservice["spec"]["rayClusterDeletionDelaySeconds"] > longest_s


def test_serve_accepts_the_rendered_string(rayservice: Config) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(rayservice["spec"]["serveConfigV2"]))
    assert [app.name for app in schema.applications] == ["dps-controller", "llm"]
